// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/device/fixed_point_params.h"
#include "backends/cuda/sm90/backward/params.h"

namespace flashmask::sm90::bwd {

struct RowParams {
  Rows out, dout, lse, dlse;
  int32_t head_dim_v;  ///< columns of out and dout
  Columns dq_columns;
  RowBias* biases;
  DqSums dq_sums;
  PlanBits plan;
  cuda::VisibleExtents extents;
  bool dense;      ///< every key block contributes to every query tile
  uint32_t* next;  ///< Schedule::next
  cuda::RowScaleParams scales;
  int32_t seqlen_q;
  uint32_t row_tiles, key_blocks, heads;  ///< key_blocks: the plan's
  float scale, score_scale;
  bool folds_delta;  ///< see kFoldsDelta
  bool in_pairs;     ///< the kernel over tiles is one that BackwardTile::runs_in_pairs
};

/// For the pass that adds up the parts of dk and dv: see BackwardParams.
struct KeyParams {
  KeyRows to;
  const float* parts;
  uint32_t heads_kv, splits, key_tiles;
  int32_t seqlen_k;
  float scale;
};

/// For the pass that computes a sink's gradient.
struct SinkGradientParams {
  cuda::SinkParams sink;
  void* dsink;  ///< [heads], of sink's dtype
  int64_t dsink_stride;
  Rows lse;
  const RowBias* biases;  ///< as written by preprocess
  bool are_terms;         ///< biases are row_terms, whose delta is a float
  int64_t rows_of_head;   ///< biases of a (batch entry, query head)
  int64_t batch;
  int32_t seqlen_q;
  uint32_t heads;
};

}  // namespace flashmask::sm90::bwd
