// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <type_traits>

#include "backends/cuda/fragments/element_mask.cuh"
#include "backends/cuda/fragments/fragments.cuh"
#include "backends/cuda/fragments/policies.cuh"
#include "backends/cuda/ptx/barrier.cuh"
#include "backends/cuda/ptx/swizzle.cuh"
#include "backends/cuda/ptx/tma.cuh"
#include "backends/cuda/sm90/forward/params.h"
#include "backends/cuda/sm90/tile_config.h"

namespace flashmask::sm90 {

struct FinalRows;

/// Entry points of features into the forward kernel: by default it has none. Params_ is ForwardParams, or derived from
/// it if a policy needs more; Score_ see ProductScore, Weights_ see AllWeights, Epilogue_ see FinalRows.
template <typename Params_ = ForwardParams, typename Score_ = cuda::ProductScore, typename Weights_ = cuda::AllWeights,
          typename Epilogue_ = FinalRows>
struct ForwardPolicies {
  using Params = Params_;
  using Score = Score_;
  using Weights = Weights_;
  using Epilogue = Epilogue_;
};

/// Named barriers, each one of as many as there are consumer warpgroups.
enum NamedBarrier : int {
  kWarpgroupBarrier = 1,  ///< joins a warpgroup's own threads
  kTurnBarrier = 8,       ///< a warpgroup's turn to issue products, given by the one before
};

/// One configuration of the forward kernel: an element type, a row of kForwardTiles, and the policies.
template <typename Element_, int kHeadDim_, int kHeadDimV_, int kConsumers_, typename Policies = ForwardPolicies<>>
struct ForwardTraits {
  using Element = Element_;
  using Params = typename Policies::Params;
  using Score = typename Policies::Score;
  using Weights = typename Policies::Weights;
  using Epilogue = typename Policies::Epilogue;
  static constexpr ForwardTile kTile = find_tile(kForwardTiles, kHeadDim_, kHeadDimV_, kConsumers_);
  static_assert(kHeadDim_ % 16 == 0 && kHeadDimV_ % 16 == 0, "a product's step, and a store's, has 16 columns");
  static_assert(!kTile.one_copy || (kHeadDim_ % 64 == 0 && kHeadDimV_ % 64 == 0), "a copy fills blocks of 64 columns");
  static_assert(kTile.keys == 128, "a tile's keys are a granule's");
  static_assert(kTile.consumers <= 3, "a tile's code has the classes of three granules");
  static_assert(kTile.q_buffers == 1 || kTile.q_buffers == 2);
  static_assert(kTile.k_parts == 1 || kTile.overlap_from == 0, "another product is under way");
  static_assert(kTile.v_parts == 1 || kTile.v_parts == 2, "P V runs by the halves of a tile's keys");
  static_assert(kTile.v_slots >= kTile.v_parts, "a tile of V has to fit");
  static_assert(registers_fit(kTile.producer_registers, kTile.consumer_registers, kTile.consumers));
  static constexpr int kQkDim = kHeadDim_, kVDim = kHeadDimV_;
  static constexpr int kConsumers = kConsumers_;
  static constexpr int kRows = kTile.rows();
  static constexpr int kKeys = kTile.keys;
  static constexpr int kQBuffers = kTile.q_buffers;
  /// Stores the output through the buffer of Q that the work tile came in. A single buffer is better left to the next
  /// work tile's rows.
  static constexpr bool kOutputThroughQ = kQBuffers > 1;
  static_assert(!kOutputThroughQ || kVDim <= kQkDim, "the output has to fit Q's buffer");
  static constexpr int kStages = kTile.k_tiles, kKParts = kTile.k_parts;
  static constexpr int kVSlots = kTile.v_slots, kVParts = kTile.v_parts;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kConsumerWarps = 4 * kConsumers;
  static constexpr int kProducerRegisters = kTile.producer_registers;
  static constexpr int kConsumerRegisters = kTile.consumer_registers;
  static constexpr int kOverlapFrom = kTile.overlap_from;
  static constexpr bool kTurns = kTile.turns;
  static constexpr bool kDrawsLate = kTile.draws_late();
  /// Makes every consumer lane read a tile's code, and arrive at k_empty for it, instead of one lane a warp: passing
  /// the code on takes longer, and the tile's first product waits for it. With an epilogue of more than rows ptxas
  /// finds no register for that.
  static constexpr bool kAllLanesRead = std::is_same_v<Epilogue, FinalRows>;
  /// Loads K of a tile before V of the previous tile. With P V under the next softmax a slot of V is free later than
  /// one of K, and K, which is needed first, would wait for it.
  static constexpr bool kKeysAhead = kOverlapFrom > 0 && kVSlots < 2 * kVParts;
  static_assert(!kKeysAhead || kStages > 1, "K of two tiles has to fit");
  static constexpr int kMaskSlots = kTile.mask_slots;
  static constexpr int kMaskRows = kTile.mask_rows;
  static constexpr int kMaskParts = 64 / kMaskRows;

  /// In shared memory rows lie in whole blocks of 64 columns.
  static constexpr int kQkBlocks = (kQkDim + 63) / 64, kVBlocks = (kVDim + 63) / 64;
  static constexpr int kBlocksOfKPart = kQkBlocks / kKParts, kKeysOfVPart = kKeys / kVParts;
  static_assert(kQkBlocks % kKParts == 0);
  using Blocks = ptx::Blocks<kTile.one_copy>;

  static constexpr uint32_t kBlockRowBytes = 64 * sizeof(Element);
  static constexpr uint32_t kQBytes = kRows * kQkBlocks * kBlockRowBytes;
  static constexpr uint32_t kKPartBytes = kKeys * kBlocksOfKPart * kBlockRowBytes;
  static constexpr uint32_t kVPartBytes = kKeysOfVPart * kVBlocks * kBlockRowBytes;

  /// Registers of a consumer thread for its warpgroup's 64 rows: S, which becomes P, and O.
  using Scores = cuda::Accumulators<64, kKeys>;
  using Outputs = cuda::Accumulators<64, kVDim>;
  /// P of one half of the tile's keys, as an operand.
  using HalfProbabilities = cuda::PackedFragments<kKeys / 2>;
};

/// The producer's announcement of a work tile: `tiles` live key blocks, or kEnd.
struct WorkTile {
  static constexpr int32_t kEnd = -1;
  int32_t row, head, batch, tiles;
};

/// The producer's announcement of a tile: the key block, and the class of each warpgroup's granule. A warpgroup's
/// partial granules carry their number, modulo 4, so that only the producer counts them.
struct Tile {
  static constexpr uint32_t kBits = 3, kFull = 1, kPartial = 4;  ///< in a class; 0 is empty
  static constexpr uint32_t kFirstBits = 0b001001001;            ///< the first bit of each class
  uint32_t code;
  __device__ __forceinline__ static Tile make(int32_t key_block, uint32_t classes) {
    return {static_cast<uint32_t>(key_block) << 3 * kBits | classes};
  }
  __device__ __forceinline__ int32_t key_block() const { return static_cast<int32_t>(code >> 3 * kBits); }
  __device__ __forceinline__ uint32_t row_class(int warpgroup) const { return code >> (kBits * warpgroup) & 7; }
  __device__ __forceinline__ bool is_live(int warpgroup) const { return row_class(warpgroup) != 0; }
  __device__ __forceinline__ bool is_partial(int warpgroup) const { return row_class(warpgroup) & kPartial; }
  /// A partial granule's number, modulo 4.
  __device__ __forceinline__ uint32_t number(int warpgroup) const { return row_class(warpgroup) & 3; }
};

template <typename Traits>
struct SharedStorage {
  using Element = typename Traits::Element;
  // Q is double-buffered if there is room: the next work tile's rows load while this one's are in use, and the output
  // leaves through the rows' own buffer (kOutputThroughQ).
  alignas(1024) Element q[Traits::kQBuffers][Traits::kRows * Traits::kQkBlocks * 64];
  alignas(1024) Element k[Traits::kStages][Traits::kKeys * Traits::kQkBlocks * 64];
  alignas(1024) Element v[Traits::kVSlots][Traits::kKeysOfVPart * Traits::kVBlocks * 64];
  uint64_t q_full[Traits::kQBuffers], q_empty[Traits::kQBuffers];
  uint64_t k_full[Traits::kStages][Traits::kKParts], k_empty[Traits::kStages][Traits::kKParts];
  uint64_t v_full[Traits::kVSlots], v_empty[Traits::kVSlots];
  uint64_t padded_full;
  /// Barriers of each warpgroup's buffers for mask bits, one for each part of a granule that goes through a buffer.
  uint64_t mask_full[Traits::kConsumers][Traits::kMaskSlots][Traits::kMaskParts];
  uint64_t mask_empty[Traits::kConsumers][Traits::kMaskSlots][Traits::kMaskParts];
  cuda::MaskBits<Traits::kMaskRows> mask_bits[Traits::kConsumers][Traits::kMaskSlots];
  WorkTile work[Traits::kQBuffers];
  /// To the work tiles' masks: in elements of the column vectors, words of the plan's bits, or bytes of a dense mask.
  int64_t mask_offset[Traits::kQBuffers];
  Tile tile[Traits::kStages];
};

/// Slot of a part of V of the producer's `tile`-th tile.
template <typename Traits>
__device__ __forceinline__ ptx::RingPosition<Traits::kVSlots> value_ring(uint32_t tile, int part) {
  return {tile * Traits::kVParts + part};
}

}  // namespace flashmask::sm90
