// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>

#include <cstdint>

#include "backends/cuda/device/arrival_params.h"
#include "backends/cuda/device/feature_params.h"
#include "backends/cuda/device/mask_params.h"
#include "backends/cuda/device/schedule.h"
#include "backends/cuda/device/tensor_rows.h"
#include "backends/cuda/sm90/common/columns.h"

namespace flashmask::sm90 {

using cuda::ElementMask, cuda::TensorRows;
using PlanBits = cuda::RowPlanBits;

struct ForwardParams {
  CUtensorMap q, k, v, out;
  float* lse;
  int64_t lse_batch_stride, lse_head_stride, lse_row_stride;
  int32_t seqlen_q, seqlen_k, key_blocks;
  uint32_t heads_q, query_heads_per_kv_head;
  float scale_log2;    ///< log2(e) * the scores' unit, at least a tiny number
  float score_of_bit;  ///< 1 / scale_log2: scores this far apart have probabilities that differ by a factor of 2
  PlanBits plan;
  ElementMask element_mask;
  cuda::MaskColumns mask;
  cuda::DenseMask dense;
  cuda::VisibleExtents extents;
  cuda::BitTiles bits;
  cuda::Schedule schedule;       ///< query heads' row tiles, the longest first; null next: every CTA has one
  unsigned long long* executed;  ///< counter of executed tiles; may be null
  TensorRows out_rows;           ///< rows of the tensor of the map `out`
  cuda::ArrivalParams arrivals;
};

/// Parameters of the kernels with features.
struct FeaturedForwardParams : ForwardParams {
  cuda::FeatureParams features;
};

/// Parameters of the kernels of partial results. `out_rows` is of float; the map `out` is of any tensor, as
/// nothing is stored by it.
struct PartialForwardParams : FeaturedForwardParams {
  Columns out_columns;
};

/// Parameters of the kernels whose scores are more than products. The host has these for all kernels, which read the
/// first part.
struct ScoredForwardParams : PartialForwardParams {
  cuda::ScoreParams scores;
  dropout::Origins origins;
};

}  // namespace flashmask::sm90
