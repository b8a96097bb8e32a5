// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>

#include <cstdint>

#include "backends/cuda/device/feature_params.h"
#include "backends/cuda/device/mask_params.h"
#include "backends/cuda/device/schedule.h"
#include "backends/cuda/sm90/common/columns.h"

namespace flashmask::sm90::bwd {

using PlanBits = cuda::KeyPlanBits;

/// A tensor indexed by (batch entry, row, head). Strides in elements.
struct Rows {
  void* data;  ///< null: absent
  int64_t batch_stride, row_stride, head_stride;

#if defined(__CUDACC__)
  template <typename T>
  __device__ __forceinline__ T* at(int64_t batch, int64_t row, int64_t head) const {
    return static_cast<T*>(data) + batch * batch_stride + row * row_stride + head * head_stride;
  }
#endif
};

struct KeyMaps {
  CUtensorMap dk, dv;
};
struct KeyRows {
  Rows dk, dv;
  Columns dk_columns, dv_columns;
};
/// Rows of the key tiles that a launch computes: another has the others.
struct KeyTileRows : KeyRows {
  int32_t first_tile, end_tile;
};
/// Destinations of dk and dv: maps for TMA, or rows for fp32 stores from registers.
union KeyGradientPlaces {
  KeyMaps maps;
  KeyTileRows rows;
};

/// The state of a query tile's sums, one word: how many key tiles contribute, and
struct Progress {
  static constexpr uint32_t kStored = 1u << 30;   ///< the first part, or zeros, lies in memory: others may be added
  static constexpr uint32_t kClaimed = 1u << 31;  ///< a store warp has claimed the first part and stores it
  static constexpr uint32_t kAlone = 1;           ///< the word of a query tile that only one key tile sees
};

/// dq, and the sums of floats or integers that it is converted from if more than one key tile contributes. For every
/// query tile of (batch entry, query head) the consumer warps' fragments follow each other (see DqBlocks), so that a
/// tile is contiguous.
struct DqSums {
  Rows out;
  float* sums;
  uint32_t* progress;  ///< one word per query tile, see Progress
  bool fixed_point;    ///< deterministic mode: the sums are integers, see RowBias::pair
};

/// Terms added to a query row's scores: S = K Q^T - lse / scale and dP = V dout^T - delta, delta = dout . out - dlse.
/// Eight bfloat16: the first three add up to -lse / scale, the next three to -delta. As rows of an operand they are
/// added by the tensor cores; if every thread read them as floats for its scores, shared memory would be busy for
/// longer. The last two may hold any finite number: 0 or, if dq is summed up in integers, the row's scale, a power of
/// two whose bits as a float are a bfloat16's and a 0.
struct alignas(16) RowBias {
  static constexpr int kScalePair = 3;
  static constexpr uint32_t kNotFinite = 0x3f80;  ///< with the scale: something of the row's dq was not finite
  uint32_t pair[4];
};

struct BackwardParams {
  CUtensorMap q, k, v, dout, dq;
  KeyGradientPlaces keys;
  RowBias* biases;  ///< [batch * heads_q, row_tiles * tile rows]; past the last row as for a row that sees nothing
  DqSums dq_sums;
  int32_t seqlen_q, seqlen_k, row_tiles;
  /// Query heads that one work tile runs through: all of a key head's, or one of its `splits` equal parts if there
  /// would be too few work tiles. Head groups are numbered through the key heads; without splits they are the key
  /// heads.
  uint32_t heads_q, head_groups, query_heads_per_group, splits;
  /// Head index (batch entry x head group) from which key tiles come in the plan's order. Earlier heads' key tiles come
  /// in the order of keys, so that tiles that run at once share the rows of few documents; another L2 group follows
  /// them, so that no long tile is left over at their end.
  uint32_t first_sorted;
  /// With splits: dk, dv of every work tile, [batch, head_groups, key_tiles, 2], see KeyFragments; otherwise null.
  float* key_parts;
  float scale;
  float scale_log2;  ///< log2(e) * the scores' unit, not 0, see score_scale
  PlanBits plan;
  cuda::MaskColumns mask;
  cuda::DenseMask dense;
  cuda::VisibleExtents extents;
  cuda::BitTiles bits;
  cuda::Schedule schedule;       ///< head groups' key tiles, in the order of keys up to first_sorted
  unsigned long long* executed;  ///< counter of executed tiles; may be null
};

/// Parameters of the kernels with features, including positions.
struct FeaturedBackwardParams : BackwardParams {
  cuda::FeatureParams features;
};

/// Parameters of the kernels whose scores are more than products. The host has these for all kernels, which read the
/// first part.
struct ScoredBackwardParams : FeaturedBackwardParams {
  cuda::ScoreParams scores;
  dropout::Origins origins;
};

}  // namespace flashmask::sm90::bwd
