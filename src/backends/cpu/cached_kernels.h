// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "cache/sequence.h"
#include "call/problem.h"
#include "common/arithmetic.h"

namespace flashmask::cpu {

/// Rows of a request for `group` query heads of each of some neighbouring key heads, from query head first_head on. Row
/// i and head g of a group are packed row i * group + g of their key head; [first, first + count) of them are meant, of
/// each key head [hk, hk + heads).
struct PackedRows {
  static constexpr int64_t kMost = 64;  ///< rows of all heads, count * heads
  int64_t b, hk, heads, first, count, group, first_head;
  int64_t total() const { return heads * count; }
  /// The request's row, and the query head, that row n of the total is.
  int64_t row(int64_t n) const { return (first + n % count) / group; }
  int64_t head(int64_t n) const { return first_head + n / count * group + (first + n % count) % group; }
  /// How many of the request's rows they are of.
  int64_t row_count() const { return row(count - 1) - row(0) + 1; }
};

/// A softmax under way, of packed rows, by head: the largest score, the sum of weights relative to it, and the weighted
/// sum of values, rows of `stride` floats.
struct SoftmaxState {
  float *largest, *sum, *out;
  int64_t stride;

  /// Makes it that of rows which have seen nothing.
  void clear(int64_t rows) const {
    std::fill(out, out + rows * stride, 0.0f);
    std::fill(largest, largest + rows, -std::numeric_limits<float>::infinity());
    std::fill(sum, sum + rows, 0.0f);
  }
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

/// Floats of scratch one thread needs for split_forward_rows, a multiple of 16.
int64_t split_forward_scratch_floats(const CachedProblem& problem);
/// out and lse of row tile r of query head h of a forward with split_size, which the problem is as a call over a cache.
/// Returns how many of the plan's tiles it executed.
int64_t split_forward_rows(const Problem& forward, const CachedProblem& problem, int64_t b, int64_t h, int64_t r,
                           float* scratch);

}  // namespace flashmask::cpu
