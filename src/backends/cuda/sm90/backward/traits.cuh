// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/ptx/tensor_core.cuh"
#include "backends/cuda/sm90/backward/params.h"
#include "backends/cuda/sm90/tile_config.h"

namespace flashmask::sm90::grad {

/// One configuration of the backward kernel: an element type, a row of kBackwardTiles, and whether an item has but some
/// of its key head's query heads, so that its dk and dv are parts.
template <typename Element_, int kHeadDim_, int kHeadDimV_, int kConsumers_, bool kSplit_ = false>
struct BackwardTraits {
  using Element = Element_;
  static constexpr BackwardTile kTile = find_tile(kBackwardTiles, kHeadDim_, kHeadDimV_, kConsumers_);
  static_assert(kHeadDim_ == kHeadDimV_ && kHeadDim_ % 64 == 0,
                "the roles have one width of 64-column blocks for Q, K, V and dO");
  static_assert(kConsumers_ == 2 && kTile.rows * kHeadDim_ == 64 * 128,
                "the consumers divide a tile's dQ into two blocks of 64 x 64");
  static_assert(registers_fit(kTile.helper_registers, kTile.consumer_registers, kTile.consumers));
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kConsumers = kConsumers_;
  static constexpr bool kSplit = kSplit_;
  static constexpr int kRows = kTile.rows;
  static constexpr int kKeys = kTile.keys();
  static constexpr int kGranules = kRows / 64;
  static constexpr int kBlocks = kHeadDim / 64;  ///< 64-column blocks of a row: the width of the 128-byte swizzle
  static constexpr int kStages = kTile.stages;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kConsumerWarps = 4 * kConsumers;
  static constexpr bool kAlternate = kTile.alternate;
  static constexpr bool kOneCode = kTile.one_code;
  /// Of a thread's scores, those whose exponentials come before dP is waited for.
  static constexpr int kEarlyScores = kRows / 4;
  static constexpr int kHelperRegisters = kTile.helper_registers, kConsumerRegisters = kTile.consumer_registers;

  static constexpr uint32_t kRowBytes = kRows * kHeadDim * sizeof(Element);
  static constexpr uint32_t kKeyBytes = kKeys * kHeadDim * sizeof(Element);
  static constexpr uint32_t kBiasBytes = kRows * sizeof(RowBias);
};

/// A tile's dq as it lies in the consumers' warps and in the sums, two blocks of 64 x 64: by rows if the tile has 128,
/// else by columns. A block's four warps' 16 x 64 follow each other; in them, lane l's float4 number e is at e * 32 +
/// l: rows l / 4 and l / 4 + 8, columns 8e + 2(l % 4) + {0, 1}.
template <int kHeadDim>
struct Fragments {
  static constexpr bool kByRows = kHeadDim == 64;
  static constexpr int kWarpFloats = 16 * 64, kWarps = 8, kTileFloats = kWarpFloats * kWarps;
  __host__ __device__ static constexpr int row(int warp) { return (kByRows ? warp : warp % 4) * 16; }
  __host__ __device__ static constexpr int column(int warp) { return kByRows ? 0 : warp / 4 * 64; }
};

/// A part of a key tile's dk or dv, 128 keys, 64 of each consumer: a warp's 16 keys follow those of the warp before,
/// and in them its blocks of 64 columns, each as in Fragments.
template <int kHeadDim>
struct KeyFragments {
  static constexpr int kBlockFloats = 16 * 64, kWarpFloats = 16 * kHeadDim, kWarps = 8,
                       kTileFloats = kWarpFloats * kWarps;
};

/// A query tile of (batch entry, query head).
struct QueryTile {
  uint32_t index;  ///< in [batch, heads_q, row_tiles]
  uint32_t batch, head;
  int32_t row_tile;

  __device__ __forceinline__ static QueryTile from_leader(const QueryTile& tile) {
    return {ptx::from_leader(tile.index), ptx::from_leader(tile.batch), ptx::from_leader(tile.head),
            ptx::from_leader(tile.row_tile)};
  }
};

/// What the producer tells the others about a tile, or about the end of an item or of everything.
struct Tile {
  enum Flag : uint32_t {
    kPartial = 1,  ///< some elements are hidden
    kFirst = 2,    ///< of its item
    kAlone = 4,    ///< no other key tile contributes to the query tile's dq
    kNothing = 8,  ///< the item has no tiles
    kEnd = 16,     ///< there are no more items
  };
  uint32_t flags;
  int32_t key_tile;
  uint32_t head_group;  ///< see BackwardParams
  QueryTile query;
};

/// The visible elements of a tile's column, a bit for each row, so that those of a lane follow each other: a consumer's
/// lane l has the scores of rows 8a + 2(l % 4) + b, and bit 8(l % 4) + 2a + b of a word is row 8a + 2(l % 4) + b of
/// its 32.
template <int kRows>
struct alignas(8) ColumnBits {
  uint32_t word[kRows / 32];

  /// A word of them from one with a row's bit in its place.
  __device__ __forceinline__ static uint32_t by_lanes(uint32_t by_rows) {
    return exchange<6, 0x00cc00cc>(exchange<12, 0x0000f0f0>(by_rows));
  }

 private:
  /// Exchanges the bits of `kMask` with those `kDistance` further up.
  template <int kDistance, uint32_t kMask>
  __device__ __forceinline__ static uint32_t exchange(uint32_t bits) {
    const uint32_t differ = (bits >> kDistance ^ bits) & kMask;
    return bits ^ differ ^ differ << kDistance;
  }
};

/// The column vectors' elements of a key tile, where each interval begins and ends.
template <int kKeys>
struct ColumnBounds {
  int32_t begin[2][kKeys], end[2][kKeys];
};

template <typename Traits>
struct SharedStorage {
  using Element = typename Traits::Element;
  alignas(1024) Element k[Traits::kKeys * Traits::kHeadDim];
  alignas(1024) Element v[Traits::kKeys * Traits::kHeadDim];
  alignas(1024) Element q[Traits::kStages][Traits::kRows * Traits::kHeadDim];
  alignas(1024) Element dout[Traits::kStages][Traits::kRows * Traits::kHeadDim];
  /// dS, [rows, keys] as rows of 64 keys of each warpgroup; twice, so that one barrier of the consumers a tile is
  /// enough.
  alignas(1024) Element ds[2][Traits::kRows * Traits::kKeys];
  /// A tile's dq on its way out, and an item's dk and dv: a piece for each consumer warp.
  alignas(1024) float out[Traits::kConsumerWarps][Fragments<Traits::kHeadDim>::kWarpFloats];
  alignas(128) RowBias biases[Traits::kStages][Traits::kRows];
  ColumnBits<Traits::kRows> mask_bits[Traits::kStages][Traits::kKeys];
  ColumnBounds<Traits::kKeys> bounds;  ///< of the item at hand; the mask warp's own
  Tile tile[Traits::kStages];
  uint64_t tile_full[Traits::kStages], mask_full[Traits::kStages];
  uint64_t scores_full[Traits::kStages];  ///< dS has been written; what all lanes of the consumers read of the tile,
                                          ///< they have read
  uint64_t q_full[Traits::kStages], q_empty[Traits::kStages];
  uint64_t dout_full[Traits::kStages], dout_empty[Traits::kStages];  ///< of the first tile of an item, V too
  uint64_t dq_full[Traits::kStages], dq_empty;
  uint64_t k_full, kv_empty;
};

}  // namespace flashmask::sm90::grad
