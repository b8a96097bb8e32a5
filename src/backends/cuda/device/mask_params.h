// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector_types.h>

#include <cstdint>

#include "flashmask/visible_extent.h"
#include "mask/rules.h"

namespace flashmask::cuda {

/// How a tensor with fewer batch entries or heads than the call is broadcast: each of its entries serves this many
/// neighbouring ones of the call.
struct Sharing {
  uint32_t batch_entries, heads;
};

/// The offset of (batch entry, head), in elements from the first.
struct PerHead {
  Sharing sharing;
  int64_t batch_stride, head_stride;

#if defined(__CUDACC__)
  __device__ __forceinline__ int64_t offset(uint32_t batch, uint32_t head) const {
    return batch / sharing.batch_entries * batch_stride + head / sharing.heads * head_stride;
  }
#endif
};

/// The element masks: the column vectors of the first one. Strides in elements; of bit tiles in words of the plan's
/// bits.
struct MaskColumns {
  rules::Columns first;
  PerHead place;
};

/// How the forward computes the visible elements of a partial granule.
enum class ElementMask : int32_t {
  kBand,     ///< the band alone
  kColumns,  ///< the band and the column vectors, and positions where a kernel has them
  kBits,     ///< the plan's bit tiles, which say all
  kDense,    ///< baseline mode: a dense matrix, and no band
};

/// The plan of all masks of a call by rows, in device memory; see PlanLayout. Bits are read as 32-bit words, and of
/// either form by granule_word.
struct RowPlanBits {
  const uint32_t* row_live;
  const uint32_t* row_full;
  const int32_t* row_tile_order;  ///< [masks, row_tiles], for the kernel's tile height
  int32_t words_per_row;
  int32_t row_granules;
  uint32_t mask_heads;  ///< heads of the plan's masks [batch or 1, mask_heads]
  Sharing sharing;
  bool in_runs = false;
};

/// The plan of all masks of a call by key blocks, for the backward.
struct KeyPlanBits {
  const uint32_t* key_live;
  const uint32_t* key_full;
  const uint32_t* row_live;
  const int32_t* key_order;  ///< [masks, key blocks]
  int32_t words_per_key, words_per_row;
  int32_t row_granules;
  uint32_t mask_heads;  ///< heads of the plan's masks [batch or 1, mask_heads]
  Sharing sharing;
  bool in_runs = false;
};

/// The plan's bit tiles, of a mask with interval lists; see PlanLayout and find_tile.
struct BitTiles {
  static constexpr int32_t kKeys = 128;
  const uint32_t* row_live;  ///< null: there are none
  const uint32_t* row_full;
  const int32_t* before;  ///< tiles before those of 32 key blocks of a row granule
  const uint2* rows_of_keys;
  int32_t words_per_row, row_granules;

  FLASHMASK_RULE bool is_set() const { return row_live != nullptr; }
};

/// How far each batch entry's visible elements reach: rows and keys past that count as zeros.
struct VisibleExtents {
  const VisibleExtent* of_batch;  ///< the plan's; null in a forward with a dense mask, which reads all rows and keys
  uint32_t batch_entries;         ///< entries of the call that share an extent

#if defined(__CUDACC__)
  __device__ __forceinline__ int32_t rows(uint32_t batch, int32_t seqlen_q) const {
    return of_batch ? __ldg(&of_batch[batch / batch_entries].rows) : seqlen_q;
  }
  __device__ __forceinline__ int32_t keys(uint32_t batch, int32_t seqlen_k) const {
    return of_batch ? __ldg(&of_batch[batch / batch_entries].keys) : seqlen_k;
  }
#endif
};

/// Baseline mode: a dense matrix, one byte an element, instead of a mask. Strides in bytes.
struct DenseMask {
  bool is_set;
  const uint8_t* visible;
  PerHead place;
  int64_t row_stride, key_stride;
};

}  // namespace flashmask::cuda
