// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>

#include "call/options.h"

namespace flashmask::reference {

/// A score as the softmax sees it, and its derivative by q . k.
struct Score {
  double value, slope;
};

/// The score of a product q . k, to which ALiBi adds `bias`.
inline Score score_of(const CommonOptions& options, double product, double bias) {
  const double scaled = options.softmax_scale * product, softcap = options.features.softcap;
  if (softcap == 0) return {scaled + bias, options.softmax_scale};
  const double cosh = std::cosh(scaled / softcap);
  return {softcap * std::tanh(scaled / softcap) + bias, options.softmax_scale / (cosh * cosh)};
}

}  // namespace flashmask::reference
