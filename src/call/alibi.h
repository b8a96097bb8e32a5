// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>

#include "call/problem.h"

namespace flashmask {

/// The slope of ALiBi for a (batch entry, query head); 0 without it.
inline double alibi_slope(const CommonOptions& options, int64_t b, int64_t h) {
  const TensorView& slopes = options.features.alibi_slopes;
  if (!slopes.defined()) return 0;
  const int64_t entry = slopes.rank == 2 ? b * slopes.stride[0] : 0;
  return static_cast<const float*>(slopes.data)[entry + h * slopes.stride[slopes.rank - 1]];
}

/// ALiBi of a (batch entry, query head): what it adds to scores (arXiv:2108.12409, section 3).
class Alibi {
 public:
  Alibi(const Problem& p, int64_t b, int64_t h) : q_offset_(p.mask.q_offset), slope_(alibi_slope(p, b, h)) {
    if (!p.features.alibi_slopes.defined() || !p.mask.has_positions) return;
    q_pos_ = p.mask.q_pos + broadcast_index(b, p.batch, p.mask.q_pos_batch) * p.seqlen_q;
    k_pos_ = p.mask.k_pos + broadcast_index(b, p.batch, p.mask.k_pos_batch) * p.seqlen_k;
  }

  double slope() const { return slope_; }
  /// Positions of a row and of a key.
  int64_t row(int64_t i) const { return q_pos_ ? q_pos_[i] : i + q_offset_; }
  int64_t key(int64_t j) const { return k_pos_ ? k_pos_[j] : j; }
  /// The bias of a score.
  double bias(int64_t i, int64_t j) const { return -slope_ * std::fabs(static_cast<double>(row(i) - key(j))); }

 private:
  int64_t q_offset_;
  double slope_;
  const int32_t *q_pos_ = nullptr, *k_pos_ = nullptr;
};

}  // namespace flashmask
