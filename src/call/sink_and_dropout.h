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

/// One of the tensors of a call's Dropout, as kernels read it.
inline dropout::Origin origin_of(const TensorView& sixteens) {
  if (!sixteens.defined() || sixteens.shape[1] == 0) return {};
  return {static_cast<const int32_t*>(sixteens.data),
          sixteens.shape[0] > 1 ? static_cast<uint32_t>(sixteens.stride[0]) : 0,
          static_cast<uint32_t>(sixteens.shape[1] - 1)};
}
inline dropout::Origins origins_of(const Dropout& dropout) {
  return {origin_of(dropout.q_origin), origin_of(dropout.k_origin), static_cast<uint32_t>(dropout.first_head)};
}

/// Which weights of a (batch entry, query head) a call's dropout keeps, and their factor. Reads the state.
class DropoutSource {
 public:
  DropoutSource(const Dropout& dropout, int64_t b, int64_t h)
      : threshold_(dropout::threshold_of(dropout.p)),
        batch_(static_cast<uint32_t>(b)),
        head_(static_cast<uint32_t>(h)) {
    if (!drops()) return;
    key_ = dropout::key_of(dropout.state[0], dropout.state[1]);
    origins_ = origins_of(dropout);
    head_ += origins_.first_head;
  }

  bool drops() const { return threshold_ > 0; }
  double scale() const { return dropout::scale_of(threshold_); }
  uint32_t threshold() const { return threshold_; }
  /// The draw that has a row and a key of the call.
  dropout::Words draw(uint32_t row, uint32_t key) const {
    return dropout::draw(key_, batch_, head_, origins_.row_draw(batch_, row), origins_.key_draw(batch_, key));
  }
  bool keeps(int64_t i, int64_t j) const {
    if (!drops()) return true;
    const auto row = static_cast<uint32_t>(i), key = static_cast<uint32_t>(j);
    return dropout::bits_of(draw(row, key), row, key) >= threshold_;
  }

 private:
  uint32_t threshold_, batch_, head_;
  dropout::Key key_{};
  dropout::Origins origins_{};
};

}  // namespace flashmask
