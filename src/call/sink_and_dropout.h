// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>

#include "call/problem.h"
#include "common/dropout.h"
#include "common/element.h"

namespace flashmask {

/// The score of the one more column that every row of query head h has; -inf, as good as none, without sinks.
inline double sink_of(const CommonOptions& options, int64_t h) {
  const TensorView& sink = options.features.sink;
  return sink.defined() ? load_element(sink, h * sink.stride[0]) : -std::numeric_limits<double>::infinity();
}

/// Sets its gradient, if the call asks for it.
inline void store_dsink(const Problem& p, int64_t h, double value) {
  if (p.dsink.defined()) store_element(p.dsink, h * p.dsink.stride[0], value);
}

/// Which weights of a (batch entry, query head) a call's dropout keeps, and their factor. Reads the state.
class DropoutSource {
 public:
  DropoutSource(const Problem& p, int64_t b, int64_t h)
      : threshold_(dropout::threshold_of(p.features.dropout.p)),
        batch_(static_cast<uint32_t>(b)),
        head_(static_cast<uint32_t>(h)) {
    if (drops()) key_ = dropout::key_of(p.features.dropout.state[0], p.features.dropout.state[1]);
  }

  bool drops() const { return threshold_ > 0; }
  double scale() const { return dropout::scale_of(threshold_); }
  uint32_t threshold() const { return threshold_; }
  dropout::Words draw(uint32_t of_row, uint32_t of_key) const {
    return dropout::draw(key_, batch_, head_, of_row, of_key);
  }
  bool keeps(int64_t i, int64_t j) const {
    if (!drops()) return true;
    const auto row = static_cast<uint32_t>(i), key = static_cast<uint32_t>(j);
    return dropout::bits_of(draw(dropout::row_draw(row), dropout::key_draw(key)), row, key) >= threshold_;
  }

 private:
  uint32_t threshold_, batch_, head_;
  dropout::Key key_{};
};

}  // namespace flashmask
