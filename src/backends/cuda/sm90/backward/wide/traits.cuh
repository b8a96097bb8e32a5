// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <type_traits>

#include "backends/cuda/sm90/backward/traits.cuh"

namespace flashmask::sm90::bwd {

/// For dq through staging tiles, one of each consumer: a block is there, and has left.
template <int kConsumers>
struct StagingBarriers {
  uint64_t full[kConsumers], empty[kConsumers];
};

/// BackwardTraits of a wide row of kBackwardTiles: both consumers have the same 64 keys, half of a plan's block. Each
/// has 32 rows of a tile's scores, and some blocks of 64 columns of dk, dv and dq.
template <typename Element_, int kHeadDim_, int kHeadDimV_, int kConsumers_, bool kSplit_ = false,
          typename Policies = BackwardPolicies<>>
struct WideTraits {
  using Element = Element_;
  using Params = typename Policies::Params;
  using Score = typename Policies::Score;
  using Weights = typename Policies::Weights;
  static constexpr DqSum kDqSum = Policies::kDqSum;
  static constexpr BackwardTile kTile = find_tile(kBackwardTiles, kHeadDim_, kHeadDimV_, kConsumers_);
  static constexpr bool kWide = true;
  static_assert(kTile.wide && !kTile.alternate && !kTile.one_code && !kTile.one_copy);
  static_assert(kHeadDim_ % 64 == 0 && kHeadDimV_ % 64 == 0, "the consumers divide columns by blocks of 64");
  static_assert(kHeadDim_ >= 128 && kHeadDim_ <= 256 && kHeadDimV_ >= 128 && kHeadDimV_ <= 256,
                "each has one or two blocks of a matrix");
  static_assert(kConsumers_ == 2 && kTile.rows == 64);
  static_assert(registers_fit(kTile.helper_registers, kTile.consumer_registers, kTile.consumers));
  static constexpr int kQkDim = kHeadDim_, kVDim = kHeadDimV_;
  static constexpr int kQkColumns = kQkDim, kVColumns = kVDim;
  static constexpr bool kOneCopy = false, kOneCode = false, kSplit = kSplit_;
  static constexpr int kConsumers = kConsumers_;
  static constexpr int kRows = kTile.rows;
  static constexpr int kKeys = kTile.keys();
  static constexpr int kGranules = 1;
  static constexpr bool kOwnKeys = false;
  static constexpr int kScoreRows = kRows / kConsumers;
  static constexpr int kStages = kTile.stages, kDoutStages = kTile.dout_stages;
  static constexpr bool kPair = kTile.runs_in_pairs(kDqSum, kSplit), kSharesRows = false;
  static_assert(!Policies::kSharesRows, "columns are divided, not rows");
  static_assert(!kPair || (kHeadDim_ > 128 && kStages == 2), "each consumer has columns of dq; dS has two stages");
  static constexpr bool kDqFromRegisters = kPair || kTile.dq_from_registers;
  static_assert(!kTile.dq_from_registers || kHeadDim_ + kHeadDimV_ <= 384,
                "operands in registers leave room for half of a dq");
  static constexpr int kEndings = 1;  ///< a store warp follows all stages
  static constexpr int kKeyTilesOfBlock = 2;
  static constexpr int kDqPieces = kTile.dq_pieces();  ///< the columns of each consumer, or all
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kConsumerWarps = 4 * kConsumers;
  static constexpr int kEarlyScores = kScoreRows / 4;
  static constexpr int kHelperRegisters = kTile.helper_registers, kConsumerRegisters = kTile.consumer_registers;

  static constexpr uint32_t kQBytes = kRows * kQkDim * sizeof(Element);
  static constexpr uint32_t kDoutBytes = kRows * kVDim * sizeof(Element);
  static constexpr uint32_t kKBytes = kKeys * kQkDim * sizeof(Element);
  static constexpr uint32_t kVBytes = kKeys * kVDim * sizeof(Element);
  static constexpr uint32_t kBiasBytes = kRows * sizeof(RowBias);
  static constexpr uint32_t kScoreBytes = kRows * kKeys * sizeof(Element);
  static constexpr int kStagingFloats = 16 * 64;

  using Scores = cuda::Accumulators<64, kScoreRows>;
  using PackedScores = cuda::PackedFragments<kScoreRows>;
  using DqBarriers = std::conditional_t<kDqFromRegisters, NoStorage, StagingBarriers<kConsumers>>;
};

/// A consumer's blocks of 64 columns of a matrix of kColumns columns. If their number is odd, the first consumer has
/// one more of dv and dq, the second one more of dk.
template <int kColumns, uint32_t kWarpgroup, bool kFirstHasMore>
struct ColumnShare {
  static constexpr int kBlocks = kColumns / 64, kOfFirst = kFirstHasMore ? (kBlocks + 1) / 2 : kBlocks / 2;
  static constexpr int kBegin = kWarpgroup == 0 ? 0 : kOfFirst,
                       kCount = kWarpgroup == 0 ? kOfFirst : kBlocks - kOfFirst;
};
template <typename Traits, uint32_t kWarpgroup>
using DvShare = ColumnShare<Traits::kVDim, kWarpgroup, true>;
template <typename Traits, uint32_t kWarpgroup>
using DkShare = ColumnShare<Traits::kQkDim, kWarpgroup, false>;
template <typename Traits, uint32_t kWarpgroup>
using DqShare = ColumnShare<Traits::kQkDim, kWarpgroup, true>;

/// 16 rows per consumer warp of dk or dv or, unless dq leaves from registers, of a block of dq, on their way out.
template <typename Traits>
struct StagingTiles {
  alignas(1024) float tile[Traits::kConsumers][4 * Traits::kStagingFloats];
};
/// A pair's CTA's storage for what it has from the other one. There is no room for staging tiles: dk and dv leave
/// through V and K.
template <typename Traits>
struct OthersStorage {
  using Element = typename Traits::Element;
  alignas(1024) Element k[Traits::kKeys * 64 * PairShare<Traits>::kBlocks];  ///< its keys, this CTA's blocks of dq
  alignas(1024) Element ds[Traits::kStages][Traits::kRows * Traits::kKeys];
};
/// Its barriers are a struct of their own: with storage that ends in padding CUDA 12.4's compiler fails.
template <typename Traits>
struct PairBarriers {
  uint64_t ds_full[Traits::kStages];   ///< the other one's dS is there
  uint64_t ds_empty[Traits::kStages];  ///< the other one has read this one's dS
  uint64_t claim_full, claim_empty;
  uint32_t claim;  ///< in the second CTA: what the first has claimed
};

template <typename Traits>
  requires Traits::kWide
struct SharedStorage<Traits> {
  using Element = typename Traits::Element;
  alignas(1024) Element k[Traits::kKeys * Traits::kQkDim];
  alignas(1024) Element v[Traits::kKeys * Traits::kVDim];
  alignas(1024) Element q[Traits::kStages][Traits::kRows * Traits::kQkDim];
  alignas(1024) Element dout[Traits::kDoutStages][Traits::kRows * Traits::kVDim];
  /// P and dS, [rows, keys]. Each has as many stages as its other factor, so that it is not overwritten before both
  /// consumers have released that factor.
  alignas(1024) Element p[Traits::kDoutStages][Traits::kRows * Traits::kKeys];
  alignas(1024) Element ds[Traits::kStages][Traits::kRows * Traits::kKeys];
  [[no_unique_address]] std::conditional_t<Traits::kPair, NoStorage, StagingTiles<Traits>> staging;
  [[no_unique_address]] std::conditional_t<Traits::kPair, OthersStorage<Traits>, NoStorage> other;
  [[no_unique_address]] std::conditional_t<Traits::kPair, PairBarriers<Traits>, NoStorage> pair;
  alignas(128) RowBias biases[Traits::kStages][Traits::kRows];
  ColumnBits<Traits::kRows> mask_bits[Traits::kStages][Traits::kKeys];
  ColumnBounds<Traits::kKeys> bounds;  ///< the current work tile's; used by the mask warp alone
  Tile tile[Traits::kStages];
  uint64_t tile_full[Traits::kStages], mask_full[Traits::kStages];
  uint64_t scores_full[Traits::kStages];  ///< P and dS are written, and all consumer lanes have read the announcement
  uint64_t q_full[Traits::kStages], q_empty[Traits::kStages];
  uint64_t dout_full[Traits::kDoutStages], dout_empty[Traits::kDoutStages];  ///< with the first tile, V too
  [[no_unique_address]] typename Traits::DqBarriers dq;
  uint64_t k_full, kv_empty;
  uint64_t padded_full;
};

}  // namespace flashmask::sm90::bwd
