// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cfloat>

#include "mask/rules.h"

namespace flashmask {

/// The scale in float8 e4m3 of numbers up to `largest` in magnitude, for hosts and devices: what makes it 448, the
/// largest number of e4m3; 1 where nothing is left of that.
FLASHMASK_RULE float token_scale(double largest) {
  const auto scale = static_cast<float>((largest < FLT_MAX ? largest : static_cast<double>(FLT_MAX)) / 448.0);
  return scale > 0 ? scale : 1.0f;
}

}  // namespace flashmask
