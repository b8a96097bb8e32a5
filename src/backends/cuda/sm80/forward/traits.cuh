// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <type_traits>

#include "backends/cuda/fragments/element_mask.cuh"
#include "backends/cuda/fragments/fragments.cuh"
#include "backends/cuda/fragments/policies.cuh"
#include "backends/cuda/sm80/common/element_bits.cuh"
#include "backends/cuda/sm80/common/shared_tile.cuh"
#include "backends/cuda/sm80/forward/params.h"
#include "backends/cuda/sm80/tile_config.h"

namespace flashmask::sm80 {

/// One configuration of the forward kernel: an element type, a row of kForwardTiles, and a variant.
template <typename Element_, int kHeadDim, int kHeadDimV, int kKilobytes, cuda::Variant variant>
struct ForwardTraits {
  using Element = Element_;
  static constexpr bool kFeatured = variant.has_features();
  using Params = std::conditional_t<kFeatured, FeaturedForwardParams, ForwardParams>;
  using Score = cuda::ScoreOf<Element, variant>;
  using Weights = cuda::WeightsOf<variant>;
  static constexpr ForwardTile kTile = find_tile(kForwardTiles, kHeadDim, kHeadDimV, kKilobytes);
  static constexpr int kQkDim = kHeadDim, kVDim = kHeadDimV;
  static constexpr int kRows = kTile.rows, kKeys = kTile.keys, kWarps = kTile.warps, kThreads = 32 * kWarps;
  static constexpr int kGranules = kRows / 64, kSteps = 128 / kKeys;  ///< granules per tile, steps per key block
  static_assert(kRows % 64 == 0 && 128 % kKeys == 0 && kKeys % 32 == 0);
  static constexpr int kRowsOfWarp = kTile.rows_per_warp(), kSlabs = kRowsOfWarp / cuda::Slab::kRows;
  static_assert(kRowsOfWarp == 16 || kRowsOfWarp == 32, "a warp's rows have one set of mask bits");
  static_assert(kVDim % 32 == 0, "a quad stores 32 columns at a time");
  /// True if O leaves enough registers for a warp's rows of Q, so that each step reads only K and V.
  static constexpr bool kQInRegisters = kSlabs == 1 && kQkDim <= 192;

  /// True if registers are left to hold threadIdx, so that no step waits some 40 cycles for a lane's number.
  static constexpr bool kHoldsThread = kSlabs == 1 || kVDim < 128;

  using QTile = SharedTile<Element, kRows, kQkDim>;
  using KTile = SharedTile<Element, kKeys, kQkDim>;
  using VTile = SharedTile<Element, kKeys, kVDim>;

  /// A thread's part of a slab, 16 of its warp's rows: S, which becomes P, and O.
  using Scores = cuda::Accumulators<16, kKeys>;
  using Outputs = cuda::Accumulators<16, kVDim>;
  /// P of one half of a step's keys, as an operand.
  using HalfProbabilities = cuda::PackedFragments<kKeys / 2>;
};

/// One step's keys of a key block, or none. The steps of a word of the plan's bits are listed in shared memory.
template <typename Traits>
struct ForwardStep {
  static constexpr int kNextBit = 16;
  int32_t first_key;
  uint32_t classes;  ///< the block's, see KeyBlockWord, and from kNextBit on the next step's place in the list
  __device__ __forceinline__ bool exists() const { return classes != 0; }
  /// 0 if it is the list's last.
  __device__ __forceinline__ uint32_t next() const { return classes >> kNextBit; }
  __device__ __forceinline__ int32_t block() const { return first_key / 128; }
  __device__ __forceinline__ int in_block() const { return first_key % 128 / Traits::kKeys; }
};

template <typename Traits>
struct SharedStorage {
  alignas(128) unsigned char q[Traits::QTile::kBytes];
  alignas(128) unsigned char k[Traits::KTile::kBytes];
  alignas(128) unsigned char v[Traits::VTile::kBytes];
  cuda::MaskBits<Traits::kRowsOfWarp> mask_bits[Traits::kWarps];
  ForwardStep<Traits> steps[32 * Traits::kSteps];  ///< steps of a word's live key blocks, in order
  int32_t key_end;  ///< end of the work tile's batch entry: keys from there on count as zeros; a register would spill
};

}  // namespace flashmask::sm80
