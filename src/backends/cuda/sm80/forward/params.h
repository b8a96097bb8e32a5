// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/device/feature_params.h"
#include "backends/cuda/device/mask_params.h"
#include "backends/cuda/device/schedule.h"
#include "backends/cuda/device/tensor_rows.h"

namespace flashmask::sm80 {

struct ForwardParams {
  cuda::TensorRows q, k, v, out;
  bool float_out;  ///< out is in fp32: partial results
  float* lse;
  int64_t lse_batch_stride, lse_head_stride, lse_row_stride;
  int32_t seqlen_q, seqlen_k, key_blocks;
  uint32_t heads_q, query_heads_per_kv_head;
  float scale_log2;    ///< log2(e) * the scores' unit, at least a tiny number
  float score_of_bit;  ///< 1 / scale_log2: scores this far apart have probabilities that differ by a factor of 2
  cuda::RowPlanBits plan;
  cuda::VisibleExtents extents;
  cuda::ElementMask element_mask;
  cuda::MaskColumns mask;
  cuda::DenseMask dense;
  cuda::BitTiles bits;
  cuda::Schedule schedule;       ///< query heads' row tiles, longest first; CTA n has the n-th of every gridDim.x
  unsigned long long* executed;  ///< counter of executed tiles of a CTA's rows x 128 keys; may be null
};

/// Parameters of the kernels with features, all of which have scores that are more than products.
struct FeaturedForwardParams : ForwardParams {
  cuda::FeatureParams features;
  cuda::ScoreParams scores;
  dropout::Origins origins;
};

}  // namespace flashmask::sm80
