// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>

#include <cstdint>

#include "backends/cuda/sm90/common/mask_params.h"

namespace flashmask::sm90 {

/// The plan of all masks of a call, in device memory; see PlanLayout. Bits are read as 32-bit words.
struct PlanBits {
  const uint32_t* row_live;
  const uint32_t* row_full;
  const int32_t* row_tile_order;  ///< [masks, row_tiles], for the kernel's tile height
  int32_t words_per_row;
  int32_t row_granules;
  uint32_t mask_heads;  ///< of the plan's masks [batch or 1, mask_heads]
  Sharing sharing;
};

/// What says which elements of a partial granule are visible.
enum class ElementMask : int32_t {
  kBand,     ///< the band alone
  kColumns,  ///< the band and the column vectors
  kDense,    ///< baseline mode: a dense matrix, and no band
};

/// Work items are (batch entry, query head, row tile). Sequences (batch entry x query head) are handed out in
/// sections whose keys and values fit the L2 cache; inside one, the longest row tiles of all its sequences first.
struct Schedule {
  uint32_t items, sequences, sequences_per_section, row_tiles;
  uint32_t* next;  ///< counter of items handed out beyond the first of every CTA; null: there are no others
};

struct ForwardParams {
  CUtensorMap q, k, v, out;
  float* lse;
  int64_t lse_batch_stride, lse_head_stride, lse_row_stride;
  int32_t seqlen_q, seqlen_k, key_blocks;
  uint32_t heads_q, query_heads_per_kv_head;
  float scale_log2;    ///< |softmax_scale| * log2(e), at least a tiny number
  float score_of_bit;  ///< 1 / scale_log2: scores this far apart have probabilities that differ by a factor of 2
  bool negate;         ///< softmax_scale < 0: scores change sign first
  PlanBits plan;
  ElementMask element_mask;
  MaskColumns mask;
  DenseMask dense;
  Schedule schedule;
  unsigned long long* executed;  ///< counter of executed tiles; may be null
};

}  // namespace flashmask::sm90
