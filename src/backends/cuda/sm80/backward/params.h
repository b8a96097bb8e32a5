// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/device/feature_params.h"
#include "backends/cuda/device/fixed_point_params.h"
#include "backends/cuda/device/mask_params.h"
#include "backends/cuda/device/schedule.h"
#include "backends/cuda/device/tensor_rows.h"

namespace flashmask::sm80::bwd {

/// Terms added to a query row's scores, in units of the exponent of 2, and to its dP. A row that sees nothing, or past
/// the end, has -inf, which makes its probabilities 0, and 0.
struct alignas(8) RowTerms {
  float minus_lse, minus_delta;
};

/// dq's sums: for every row tile of (batch entry, query head) the warps' fragments one after the other, so that a warp
/// adds to 128 contiguous bytes at a time, see DqFragments.
struct DqSums {
  float* sums;         ///< in fp32, or in fixed point: integers of 32 bits
  uint32_t* has_sums;  ///< for each row tile: 1 if some key tile contributes, else 0
  float* scales;       ///< in fixed point, for each row of each row tile, see RowScales
  bool fixed_point;    ///< in deterministic mode: no order of additions changes an integer
};

struct BackwardParams {
  cuda::TensorRows q, k, v, dout;
  cuda::TensorRows dk, dv;  ///< one per head group, see below
  bool float_keys;          ///< dk and dv are in fp32: partial results, or parts that are added up
  const RowTerms* terms;    ///< [batch * heads_q, row_tiles * tile rows]
  DqSums dq;
  int32_t seqlen_q, seqlen_k, row_tiles, key_blocks;  ///< key_blocks: the plan's
  /// Query heads that one work tile goes through: all of a key head's group, or, where that leaves too few work tiles,
  /// one of its `splits` equal parts. Head groups are numbered through the key heads; without splits they are the
  /// key heads.
  uint32_t heads_q, head_groups, query_heads_per_group, splits;
  float scale;
  float scale_log2;  ///< log2(e) * the scores' unit
  cuda::KeyPlanBits plan;
  cuda::VisibleExtents extents;
  cuda::MaskColumns mask;
  cuda::DenseMask dense;
  cuda::BitTiles bits;
  cuda::Schedule schedule;       ///< head groups' key tiles, most work first
  unsigned long long* executed;  ///< counter of executed tiles, of the plan's rows and keys; may be null
  cuda::FeatureParams features;  ///< all kernels read their positions
};

/// Parameters of the kernels whose scores are more than products.
struct ScoredBackwardParams : BackwardParams {
  cuda::ScoreParams scores;
  dropout::Origins origins;
};

/// Parameters of the kernels before and after, with a block for each row tile.
struct RowParams {
  cuda::TensorRows out, dout, lse, dlse, dq;  ///< dlse's data may be null; lse and dlse have one column
  bool float_rows;                            ///< out and dq are in fp32: partial results
  RowTerms* terms;
  DqSums dq_sums;
  cuda::RowScaleParams scales;  ///< in fixed point
  cuda::KeyPlanBits plan;
  cuda::VisibleExtents extents;
  bool dense;      ///< every key block contributes to every row tile
  uint32_t* next;  ///< Schedule::next
  int32_t seqlen_q;
  uint32_t row_tiles, key_blocks, heads;  ///< key_blocks: the plan's
  float scale;
};

/// Parameters of the kernel that adds up the parts of dk and dv if query heads are split. Each kReducedKeys keys of a
/// key head have a block for dk and one for dv.
struct KeyParams {
  static constexpr int kReducedKeys = 32;
  cuda::TensorRows dk, dv;
  bool float_keys;                      ///< dk and dv are in fp32: partial results
  cuda::TensorRows dk_parts, dv_parts;  ///< in fp32, one per head group, see BackwardParams
  uint32_t heads_kv, splits;
  int32_t seqlen_k;
};

/// Parameters of the kernel that computes a sink's gradient, with a block for each query head.
struct SinkGradientParams {
  cuda::SinkParams sink;
  void* dsink;  ///< [heads], of sink's dtype
  int64_t dsink_stride;
  cuda::TensorRows lse;
  const RowTerms* terms;  ///< as preprocess has written them
  int64_t rows_of_head;   ///< terms of a (batch entry, query head)
  int64_t batch;
  int32_t seqlen_q;
  uint32_t heads;
};

}  // namespace flashmask::sm80::bwd
