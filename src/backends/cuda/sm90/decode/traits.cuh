// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include <type_traits>

#include "backends/cuda/cache/work.h"
#include "backends/cuda/device/delay.cuh"
#include "backends/cuda/fragments/element_mask.cuh"
#include "backends/cuda/fragments/fragments.cuh"
#include "backends/cuda/ptx/barrier.cuh"
#include "backends/cuda/ptx/swizzle.cuh"
#include "backends/cuda/sm90/decode/params.h"
#include "backends/cuda/sm90/decode/tile_config.h"

namespace flashmask::sm90 {

/// One configuration of the decode kernel: an element type, a row of kDecodeTiles, and a variant.
template <typename Element_, int kHeadDim_, int kHeadDimV_, int kConsumers_, cuda::Variant variant>
struct DecodeTraits {
  using Element = Element_;
  /// A cache of e4m3 has products in f16, which holds all of its numbers.
  static constexpr bool kFloat8 = variant.float8;
  using Product = std::conditional_t<kFloat8, __half, Element>;
  using Stored = std::conditional_t<kFloat8, uint8_t, Element>;
  static constexpr int kConsumers = kConsumers_;
  static_assert(kConsumers == 1 || kConsumers == 2);
  static constexpr DecodeTile kTile = decode_tile(kHeadDim_, kHeadDimV_, kConsumers);
  static constexpr int kQkDim = kHeadDim_, kVDim = kHeadDimV_;
  static_assert(kQkDim % 64 == 0 && kVDim % 64 == 0, "rows lie in blocks of 64 columns");
  static constexpr int kRows = kTile.rows(), kKeys = cuda::kBlockKeys;
  static constexpr int kSlabRows = 64;  ///< a warpgroup's
  static constexpr int kSpreadRows = kTile.spread_rows();
  /// A slot has a part of a tile's keys, or of its values, for the same number of keys.
  static constexpr int kSlots = kTile.slots, kParts = kTile.parts, kSlotKeys = kKeys / kParts;
  static_assert(kParts == 1 || kParts == 2);
  static_assert(kSlots >= kParts, "a tile has to fit");
  static constexpr int kQkBlocks = kQkDim / 64, kVBlocks = kVDim / 64;
  /// Keys, or values, that are copied at a time, how many copies make a tile, and the slots that they go through.
  /// Copies of e4m3 have a ring of their own.
  static constexpr int kCopiedKeys = kTile.copied_keys(kFloat8), kCopyParts = kKeys / kCopiedKeys,
                       kCopySlots = kFloat8 ? kTile.copies : kSlots;
  static constexpr uint32_t kKeyCopyBytes = kCopiedKeys * kQkBlocks * 64 * sizeof(Stored),
                            kValueCopyBytes = kCopiedKeys * kVBlocks * 64 * sizeof(Stored);
  static constexpr int kConsumerThreads = 128 * kConsumers, kThreads = kConsumerThreads + 128;
  static constexpr int kKeyWarp = 4 * kConsumers, kValueWarp = kKeyWarp + 1, kMaskWarp = kKeyWarp + 2,
                       kQueryWarp = kKeyWarp + 3;
  static constexpr int kCtas = kTile.ctas;  ///< a multiprocessor has
  /// Registers of a thread where warpgroups are more than two, after they have exchanged them.
  static constexpr int kConsumerRegisters = kConsumers == 1 ? 168 : 216, kOtherRegisters = kConsumers == 1 ? 88 : 72;
  static constexpr bool kExchangesRegisters = kCtas * kConsumers > 1;
  static_assert(kCtas * 128 * (kConsumers * kConsumerRegisters + kOtherRegisters) <= kRegistersOfBlock ||
                !kExchangesRegisters);
  /// With batch_invariant units have all splits of a sequence.
  static constexpr bool kFolds = kConsumers > 1 && !kFloat8;
  /// Takes units that are dealt whole.
  static constexpr bool kTakesDealt = kConsumers > 1;
  /// Looks for another unit's blocks after copies, for which not all kernels have registers.
  static constexpr bool kCopiesFirst = kConsumers > 1 && !kFloat8 && kParts == 1;
  /// Loads Q by TMA where its strides allow: a warp takes longer for 128 rows than the products with some tiles.
  static constexpr bool kBoxesQueries = kConsumers > 1;
  /// Lets L2 keep keys and values, which other row tiles read.
  static constexpr bool kKeepsKeys = kConsumers > 1;
  /// But not those that a forest's few rows see, for which not all kernels have registers, either.
  static constexpr bool kDropsKeys = kKeepsKeys && kCopiesFirst;
  static constexpr int kWorks = 4, kTiles = 4, kMasks = kTile.masks, kQueries = kTile.queries;
  static constexpr bool kOverlaps = kTile.overlaps, kTurns = kTile.turns;
  static_assert(!kTurns || kConsumers > 1);
  static_assert(!kOverlaps || kSlots > kParts, "products of two tiles are under way");
  static_assert(!kFloat8 || (kOverlaps && kSpreadRows == 0 && kParts == 1 && kQkBlocks == kVBlocks));
  static_assert(!kFloat8 || (kCopySlots > 0 && kCopySlots <= 2 * kCopyParts),
                "a tile's announcement waits for none whose keys are yet to be converted");
  static constexpr int kTileElements = kSlotKeys * kQkBlocks * 64;

  using Scores = cuda::Accumulators<kSlabRows, kKeys>;
  using Outputs = cuda::Accumulators<kSlabRows, kVDim>;
  using HalfProbabilities = cuda::PackedFragments<kKeys / 2>;
};

/// The producer's announcement of a unit's part in a share.
using Work = cuda::UnitPart;

/// The producer's announcement of a tile. A key block past the last is of a unit that has none: all of it is hidden.
struct KeyTile {
  static constexpr uint32_t kMasked = 1u << 31;     ///< the mask warp has bits for it
  static constexpr uint32_t kNextSplit = 1u << 30;  ///< it begins a split behind another of its unit
  uint32_t code;
  __device__ __forceinline__ static KeyTile make(int32_t block, bool masked, bool next_split) {
    return {static_cast<uint32_t>(block) | (masked ? kMasked : 0) | (next_split ? kNextSplit : 0)};
  }
  __device__ __forceinline__ int32_t first_key() const {
    return static_cast<int32_t>(code & ~(kMasked | kNextSplit)) * cuda::kBlockKeys;
  }
  __device__ __forceinline__ bool is_masked() const { return code & kMasked; }
  __device__ __forceinline__ bool begins_next_split() const { return code & kNextSplit; }
};

/// The findings of a mask warp about a tile of at most kRows rows.
template <int kRows>
struct TileMask {
  cuda::MaskBits<kRows> bits;           ///< by row of the call, not by packed row
  int32_t positions[cuda::kBlockKeys];  ///< the keys', if ALiBi needs them
};

/// The factors of a tile's keys and values.
struct TileFactors {
  float k[cuda::kBlockKeys], v[cuda::kBlockKeys];
};

/// The part of shared memory that a kernel over caches of e4m3 has besides.
template <typename Traits>
struct Float8Shared {
  static constexpr int kFactors = 4;  ///< tiles whose factors are in flight
  alignas(128) unsigned char k[Traits::kCopySlots][Traits::kKeyCopyBytes];
  alignas(128) unsigned char v[Traits::kCopySlots][Traits::kValueCopyBytes];
  TileFactors factors[kFactors];
  float q_unit[Traits::kRows];  ///< a row's products are multiplied by it
  uint64_t k_copied[Traits::kCopySlots], v_copied[Traits::kCopySlots];
  uint64_t factors_full[kFactors], factors_empty[kFactors];
};
struct NothingShared {};

template <typename Traits>
struct DecodeShared {
  using Element = typename Traits::Element;
  using Product = typename Traits::Product;
  alignas(1024) Element q[Traits::kQueries][Traits::kRows * Traits::kQkBlocks * 64];
  alignas(1024) Product k[Traits::kSlots][Traits::kSlotKeys * Traits::kQkBlocks * 64];
  alignas(1024) Product v[Traits::kSlots][Traits::kSlotKeys * Traits::kVBlocks * 64];
  TileMask<Traits::kRows> masks[Traits::kMasks];
  Work works[Traits::kWorks];
  KeyTile tiles[Traits::kTiles];
  uint64_t k_full[Traits::kSlots], k_empty[Traits::kSlots];
  uint64_t v_full[Traits::kSlots], v_empty[Traits::kSlots];
  uint64_t work_full[Traits::kWorks], work_empty[Traits::kWorks];
  uint64_t tile_full[Traits::kTiles], tile_empty[Traits::kTiles];
  uint64_t mask_full[Traits::kMasks], mask_empty[Traits::kMasks];
  uint64_t q_full[Traits::kQueries], q_empty[Traits::kQueries];
  uint32_t arrived;
  std::conditional_t<Traits::kFloat8, Float8Shared<Traits>, NothingShared> float8;
};

}  // namespace flashmask::sm90
