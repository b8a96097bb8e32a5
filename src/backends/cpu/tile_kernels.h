// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "call/problem.h"
#include "common/arithmetic.h"

namespace flashmask::cpu {

/// The tile every kernel works in is one granule of the plan.
inline constexpr int64_t kTileRows = kGranuleRows;
inline constexpr int64_t kTileKeys = kGranuleKeys;

/// Columns that a product of matrices makes at once, at most; a power of two.
inline constexpr int64_t kMaxWidth = 32;

/// Consecutive row tiles that forward_rows takes at once at most, so that K and V are read once for all of them.
inline constexpr int64_t kRowTilesAtOnce = 8;

/// A backward's state for every row of every query head, in row tiles. dq, not yet scaled, is summed up in float32: in
/// dq itself if sums_in_dq(), otherwise in rows of its own.
struct BackwardRows {
  float* delta = nullptr;   ///< sum over the row of dout * out, less the gradient of lse
  int32_t* turn = nullptr;  ///< for each row tile: the key tile that adds to dq next
  float* own_dq = nullptr;

  static int64_t row_tiles(const Problem& p) { return ceil_div(p.seqlen_q, kTileRows); }
  static int64_t tile(const Problem& p, int64_t b, int64_t h, int64_t r) {
    return (b * p.heads_q + h) * row_tiles(p) + r;
  }
  /// Products write whole panels of columns.
  static bool sums_in_dq(const Problem& p) {
    return p.dq.dtype == DataType::kFloat32 && p.head_dim % kMaxWidth == 0 && p.dq.stride[3] == 1;
  }
  static int64_t dq_stride(const Problem& p) {
    return sums_in_dq(p) ? p.dq.stride[1] : round_up(p.head_dim, kMaxWidth);
  }

  float* delta_of(const Problem& p, int64_t b, int64_t h, int64_t r) const {
    return delta + tile(p, b, h, r) * kTileRows;
  }
  int32_t* turn_of(const Problem& p, int64_t b, int64_t h, int64_t r) const { return turn + tile(p, b, h, r); }
  float* dq_of(const Problem& p, int64_t b, int64_t h, int64_t r) const {
    return sums_in_dq(p) ? row_at<float>(p.dq, b, r * kTileRows, h)
                         : own_dq + tile(p, b, h, r) * kTileRows * dq_stride(p);
  }
};

/// Bytes of scratch one thread needs, a multiple of 64.
std::size_t scratch_bytes(const Problem& problem);

// One item of work each. `scratch` is aligned to 64 bytes; a number returned is that of the tiles executed.

/// out and lse of row tiles [first, last) of query head h, kRowTilesAtOnce at most.
int64_t forward_rows(const Problem& problem, int64_t b, int64_t h, int64_t first, int64_t last, float* scratch);
/// Makes delta, dq and turn of row tile r of query head h ready, for all of a call before its first backward_keys.
void prepare_backward(const Problem& problem, const BackwardRows& shared, int64_t b, int64_t h, int64_t r,
                      float* scratch);
/// dk and dv of key tile c of key head hk, summed over the query heads of its group, and the tile's part of their dq.
/// Waits for lower key tiles of the same key head: a thread must call it in ascending order of them.
int64_t backward_keys(const Problem& problem, const BackwardRows& shared, int64_t b, int64_t hk, int64_t c,
                      float* scratch);
/// dq of row tile r of query head h, after all of backward_keys.
void store_dq(const Problem& problem, const BackwardRows& shared, int64_t b, int64_t h, int64_t r);

/// "AVX2", ...: the instruction set the kernels were dispatched to.
const char* simd_target();

}  // namespace flashmask::cpu
