// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/sm90/forward/element_mask.cuh"
#include "backends/cuda/sm90/tile_config.h"

namespace flashmask::sm90 {

/// One configuration of the forward kernel: an element type and a row of kForwardTiles.
template <typename Element_, int kHeadDim_, int kHeadDimV_, int kConsumers_>
struct ForwardTraits {
  using Element = Element_;
  static constexpr ForwardTile kTile = find_tile(kForwardTiles, kHeadDim_, kHeadDimV_, kConsumers_);
  static_assert(kHeadDim_ == kHeadDimV_ && kHeadDim_ % 64 == 0,
                "the roles have one width of 64-column blocks for Q, K and V");
  static_assert(registers_fit(kTile.producer_registers, kTile.consumer_registers, kTile.consumers));
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kConsumers = kConsumers_;
  static constexpr int kRows = kTile.rows();
  static constexpr int kKeys = kTile.keys;
  static constexpr int kBlocks = kHeadDim / 64;  ///< 64-column blocks of a row: the width of the 128-byte swizzle
  static constexpr int kStages = kTile.stages;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kConsumerWarps = 4 * kConsumers;
  static constexpr int kProducerRegisters = kTile.producer_registers;
  static constexpr int kConsumerRegisters = kTile.consumer_registers;
  static constexpr int kOverlapFrom = kTile.overlap_from;
  static constexpr int kMaskSlots = kTile.mask_slots;
  static constexpr int kMaskRows = kTile.mask_rows;
  static constexpr int kMaskParts = 64 / kMaskRows;

  static constexpr uint32_t kQueryBytes = kRows * kHeadDim * sizeof(Element);
  static constexpr uint32_t kKeyBytes = kKeys * kHeadDim * sizeof(Element);
};

/// What the producer tells the others about an item: `tiles` live key blocks, or kEnd.
struct Item {
  static constexpr int32_t kEnd = -1;
  int32_t row, head, batch, tiles;
};

/// What the producer tells the others about a tile: the key block, and the class of each warpgroup's granule. The
/// partial ones of a warpgroup carry their number, modulo 4, so that nobody else has to count them.
struct Tile {
  static constexpr uint32_t kBits = 3, kFull = 1, kPartial = 4;  ///< of a class; 0 is empty
  static constexpr uint32_t kFirstBits = 0b001001001;            ///< of all classes
  uint32_t code;
  __device__ __forceinline__ static Tile make(int32_t key_block, uint32_t classes) {
    return {static_cast<uint32_t>(key_block) << 3 * kBits | classes};
  }
  __device__ __forceinline__ int32_t key_block() const { return static_cast<int32_t>(code >> 3 * kBits); }
  __device__ __forceinline__ uint32_t row_class(int warpgroup) const { return code >> (kBits * warpgroup) & 7; }
  __device__ __forceinline__ bool is_live(int warpgroup) const { return row_class(warpgroup) != 0; }
  __device__ __forceinline__ bool is_partial(int warpgroup) const { return row_class(warpgroup) & kPartial; }
  /// Of a partial granule: its number, modulo 4.
  __device__ __forceinline__ uint32_t number(int warpgroup) const { return row_class(warpgroup) & 3; }
};

template <typename Traits>
struct SharedStorage {
  using Element = typename Traits::Element;
  // Q is double-buffered: the next item's rows load while this one's are in use, and the output leaves through
  // the rows' own buffer.
  alignas(1024) Element q[2][Traits::kRows * Traits::kHeadDim];
  alignas(1024) Element k[Traits::kStages][Traits::kKeys * Traits::kHeadDim];
  alignas(1024) Element v[Traits::kStages][Traits::kKeys * Traits::kHeadDim];
  uint64_t q_full[2], q_empty[2];
  uint64_t k_full[Traits::kStages], k_empty[Traits::kStages];
  uint64_t v_full[Traits::kStages], v_empty[Traits::kStages];
  /// Of each warpgroup's buffers for mask bits, for the parts of a granule that go through one.
  uint64_t mask_full[Traits::kConsumers][Traits::kMaskSlots][Traits::kMaskParts];
  uint64_t mask_empty[Traits::kConsumers][Traits::kMaskSlots][Traits::kMaskParts];
  MaskBits<Traits::kMaskRows> mask_bits[Traits::kConsumers][Traits::kMaskSlots];
  Item item[2];
  int64_t mask_offset[2];  ///< of the items' masks: elements of the column vectors, bytes of a dense mask
  Tile tile[Traits::kStages];
};

}  // namespace flashmask::sm90
