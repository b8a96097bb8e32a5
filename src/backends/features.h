// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>

#include "backends/problem.h"
#include "common/element.h"

namespace flashmask {

/// The score of the one more column that every row of query head h has; -inf, as good as none, without sinks.
inline double sink_of(const Problem& p, int64_t h) {
  const TensorView& sink = p.features.sink;
  return sink.defined() ? load_element(sink, h * sink.stride[0]) : -std::numeric_limits<double>::infinity();
}

/// Sets its gradient, if the call asks for it.
inline void store_dsink(const Problem& p, int64_t h, double value) {
  if (p.dsink.defined()) store_element(p.dsink, h * p.dsink.stride[0], value);
}

}  // namespace flashmask
