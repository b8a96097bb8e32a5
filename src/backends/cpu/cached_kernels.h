// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "cache/sequence.h"
#include "common/arithmetic.h"

namespace flashmask::cpu {

/// Rows of a request for some neighbouring key heads. Row i and head g of a group are packed row i * group_size + g of
/// their key head; [first, first + count) of them are meant, of each key head [hk, hk + heads).
struct PackedRows {
  static constexpr int64_t kMost = 64;  ///< rows of all heads, count * heads
  int64_t b, hk, heads, first, count;
  int64_t total() const { return heads * count; }
};

/// A softmax under way, of packed rows, by head: the largest score, the sum of weights relative to it, and the weighted
/// sum of values, rows of `stride` floats.
struct SoftmaxState {
  float *largest, *sum, *out;
  int64_t stride;

  /// The rows from n on.
  SoftmaxState from(int64_t n) const { return {largest + n, sum + n, out + n * stride, stride}; }
  /// Floats of a row's state: whole vectors of every instruction set, so that each lies on a cache line.
  static constexpr int64_t out_stride(int64_t head_dim_v) { return round_up(head_dim_v, 32); }
  static int64_t floats_per_row(int64_t head_dim_v) { return 16 + out_stride(head_dim_v); }
  /// The state of `rows` rows that lies at `at`.
  static SoftmaxState in(float* at, int64_t rows, int64_t head_dim_v) {
    const int64_t stride = out_stride(head_dim_v);
    return {at + rows * stride, at + rows * (stride + 1), at, stride};
  }
};

/// Floats of scratch one thread needs, a multiple of 16.
int64_t cached_scratch_floats(const CachedProblem& problem);

/// The softmax of the rows over the keys [begin, end) of their sequence, from nothing. Leaves every row's state set.
void cached_split(const CachedProblem& problem, const Sequence& sequence, const PackedRows& rows, int64_t begin,
                  int64_t end, const SoftmaxState& state, float* scratch);
/// Adds a later split's state to one of the same rows.
void fold_state(const SoftmaxState& to, const SoftmaxState& split, int64_t rows, int64_t head_dim_v);
/// Writes out and lse of the rows, whose state is that of all keys.
void store_rows(const CachedProblem& problem, const Sequence& sequence, const PackedRows& rows,
                const SoftmaxState& state);

}  // namespace flashmask::cpu
