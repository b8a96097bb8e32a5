// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <type_traits>

#include "backends/cuda/fragments/fragments.cuh"
#include "backends/cuda/fragments/policies.cuh"
#include "backends/cuda/ptx/registers.cuh"
#include "backends/cuda/ptx/swizzle.cuh"
#include "backends/cuda/sm90/backward/params.h"
#include "backends/cuda/sm90/backward/row_bias.cuh"
#include "backends/cuda/sm90/tile_config.h"

namespace flashmask::sm90::bwd {

/// Entry points of features into the backward kernel: by default it has none. Params_ is BackwardParams, or derived
/// from it if a policy needs more; Score_ see ProductScore, Weights_ see AllWeights.
template <typename Params_ = BackwardParams, typename Score_ = cuda::ProductScore, typename Weights_ = cuda::AllWeights,
          DqSum sum = DqSum::kEither, bool shares_rows = false>
struct BackwardPolicies {
  using Params = Params_;
  using Score = Score_;
  using Weights = Weights_;
  static constexpr DqSum kDqSum = sum;
  static constexpr bool kSharesRows = shares_rows;
};

/// The parameters of a variant.
template <cuda::Variant variant>
using ParamsOf = std::conditional_t<variant.scores, ScoredBackwardParams,
                                    std::conditional_t<variant.has_features(), FeaturedBackwardParams, BackwardParams>>;

/// The policies of a variant. A kernel that sums dq up in one way alone is a second kernel: ptxas schedules each
/// better.
template <typename Element, cuda::Variant variant>
using PoliciesOf = BackwardPolicies<ParamsOf<variant>, cuda::ScoreOf<Element, variant>, cuda::WeightsOf<variant>,
                                    variant.sum, variant.shares_rows>;

/// A variant of the unit, for the kernels before and after the unit's: it tells whether rows' terms are folded.
constexpr cuda::Variant unit_variant(Unit unit) {
  for (const VariantRow& row : kBackwardVariants) {
    if (row.unit == unit) return row.variant;
  }
  return {};
}

/// True if the call sums dq up in integers.
template <typename Traits>
__device__ __forceinline__ bool sums_integers(const BackwardParams& p) {
  return Traits::kDqSum == DqSum::kEither ? p.dq_sums.fixed_point : Traits::kDqSum == DqSum::kIntegers;
}
/// True if a call of this kernel may do so.
template <typename Traits>
inline constexpr bool kMaySumIntegers = Traits::kDqSum != DqSum::kFloats;

/// Leaves S as a plain product, and adds lse's term after the features have transformed it. For kernels whose scores
/// are more than the products.
template <typename Traits>
inline constexpr bool kTermsLast = !Traits::Score::kFoldsLse;
/// Starts dP at -delta, by a step of its product. Kernels with dropout, which leaves elements of dP out, add it later.
template <typename Traits>
inline constexpr bool kFoldsDelta = !kTermsLast<Traits> || !Traits::Weights::kMayDrop;

/// Named barriers of both consumer warpgroups, one for each of them to wait at: compute-sanitizer does not take a
/// barrier that is reached from two places.
enum NamedBarrier : int {
  kScoresBarrier = 1,   ///< dS of the tile is in shared memory
  kStagingBarrier = 3,  ///< the work tile's last dq has left the staging tiles; in a pair, K and V have been read
  kExchangeBarrier = 5  ///< in a pair: a dS of no use may be sent; where rows are shared: the other CTA's part is read
};

/// Columns in whole blocks of 64, as shared memory holds them.
template <int kColumns>
inline constexpr int kWholeBlocks = (kColumns + 63) / 64 * 64;

/// One configuration of the backward kernel: an element type, a row of kBackwardTiles, whether a work tile has only
/// some of its key head's query heads, so that its dk and dv are parts, and the policies.
template <typename Element_, int kHeadDim_, int kHeadDimV_, int kConsumers_, bool kSplit_ = false,
          typename Policies = BackwardPolicies<>>
struct BackwardTraits {
  using Element = Element_;
  using Params = typename Policies::Params;
  using Score = typename Policies::Score;
  using Weights = typename Policies::Weights;
  static constexpr DqSum kDqSum = Policies::kDqSum;
  static constexpr BackwardTile kTile = find_tile(kBackwardTiles, kHeadDim_, kHeadDimV_, kConsumers_);
  static constexpr bool kWide = false;
  static_assert(!kTile.wide && !kTile.dq_from_registers);
  static_assert(Score::kFoldsLse || !kTile.halves, "there would be no registers for it");
  static_assert(kHeadDim_ % 32 == 0 && kHeadDimV_ % 32 == 0);
  static_assert(kHeadDim_ + kHeadDimV_ <= (kTile.halves ? 320 : 256), "dk and dv of 64 keys have to leave registers");
  static_assert(kConsumers_ == 2 && (kTile.alternate || (kTile.rows == 64 && kHeadDim_ % 64 == 0)),
                "unless they alternate, the consumers divide the columns of a tile's dQ into two blocks of 64 rows");
  static_assert(!kTile.halves || (kTile.rows == 64 && !kTile.alternate && !kTile.one_code),
                "two halves of 32 rows each; the consumers differ in how they compute dQ");
  static_assert(registers_fit(kTile.helper_registers, kTile.consumer_registers, kTile.consumers));
  static constexpr int kQkDim = kHeadDim_, kVDim = kHeadDimV_;
  /// Columns of Q, K and dq, and of V and dO, in shared memory: whole blocks, which TMA pads with zeros.
  static constexpr int kQkColumns = kWholeBlocks<kQkDim>, kVColumns = kWholeBlocks<kVDim>;
  static constexpr bool kOneCopy = kTile.one_copy;
  static constexpr int kConsumers = kConsumers_;
  static constexpr bool kSplit = kSplit_;
  static constexpr int kRows = kTile.rows;
  static constexpr int kKeys = kTile.keys();
  static constexpr int kGranules = kRows / 64;
  static constexpr bool kOwnKeys = true;    ///< the consumers divide a tile's keys
  static constexpr int kScoreRows = kRows;  ///< rows that a consumer has scores of
  static constexpr int kStages = kTile.stages, kDoutStages = kTile.dout_stages;
  static_assert(kDoutStages == (kTile.halves ? 1 : kStages));
  static constexpr int kDsStages = kTile.halves ? 1 : 2;
  static constexpr int kEndings = kStages;    ///< announcements of the end: one for each store warp
  static constexpr int kKeyTilesOfBlock = 1;  ///< key tiles that a key block of the plan is divided into
  static constexpr int kDqPieces = kTile.dq_pieces();
  static constexpr bool kDqFromRegisters = false, kPair = false;
  /// Has two CTAs share each work tile's rows, see PartExchange.
  static constexpr bool kSharesRows = Policies::kSharesRows;
  static_assert(!kSharesRows || (!kSplit && !kTile.halves));
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kConsumerWarps = 4 * kConsumers;
  static constexpr bool kAlternate = kTile.alternate;
  static constexpr bool kOneCode = kTile.one_code;
  /// Scores per thread that are exponentiated before waiting for dP.
  static constexpr int kEarlyScores = kTile.halves ? kRows / 8 : kRows / 4;
  static constexpr int kHelperRegisters = kTile.helper_registers, kConsumerRegisters = kTile.consumer_registers;

  static constexpr uint32_t kQBytes = kRows * kQkColumns * sizeof(Element);
  static constexpr uint32_t kDoutBytes = kRows * kVColumns * sizeof(Element);
  static constexpr uint32_t kKBytes = kKeys * kQkColumns * sizeof(Element);
  static constexpr uint32_t kVBytes = kKeys * kVColumns * sizeof(Element);
  static constexpr uint32_t kBiasBytes = kRows * sizeof(RowBias);
  static constexpr int kStagingFloats = 16 * kQkColumns / 2 > 16 * 64 ? 16 * kQkColumns / 2 : 16 * 64;

  /// Registers of a consumer thread for its warpgroup's 64 keys: S and dP, with the tile's rows as columns, dK and dV.
  using Scores = cuda::Accumulators<64, kRows>;
  using KeyGradients = cuda::Accumulators<64, kQkDim>;
  using ValueGradients = cuda::Accumulators<64, kVDim>;
  /// P or dS, as an operand.
  using PackedScores = cuda::PackedFragments<kRows>;
};

/// True for kernels whose CTAs run in clusters of two: the first one's producer claims work tiles for both.
template <typename Traits>
inline constexpr bool kInCluster = Traits::kPair || Traits::kSharesRows;

/// True for kernels that compute dP in halves, as registers are scarce.
template <typename Traits>
inline constexpr bool kHalves = Traits::kTile.halves;

/// Lane id, re-read from the special register when registers are scarce, so that values derived from it are not kept
/// live.
template <typename Traits>
__device__ __forceinline__ uint32_t reload_lane() {
  return kHalves<Traits> || kTermsLast<Traits> ? ptx::reload_lane() : ptx::lane();
}

/// A tile's dq as it lies in the consumers' warps, in the staging tiles and in the sums: blocks of 64 rows and
/// kBlockColumns columns; blocks with the same columns follow each other. A block's four warps' 16 rows follow each
/// other; in them, lane l's float4 number e is at e * 32 + l: rows l / 4 and l / 4 + 8, columns 8e + 2(l % 4) + {0, 1}.
template <typename Traits>
struct DqBlocks {
  static constexpr int kBlockColumns = Traits::kTile.dq_columns();
  static constexpr int kRowBlocks = Traits::kRows / 64, kColumnBlocks = Traits::kQkDim / kBlockColumns,
                       kBlocks = kRowBlocks * kColumnBlocks;
  static constexpr int kWarpsOfColumns = 4 * kRowBlocks;  ///< with the same columns: 16 rows each
  static constexpr int kWarpFloats = 16 * kBlockColumns, kWarps = 4 * kBlocks, kTileFloats = kWarpFloats * kWarps;
  /// The first row, and the block of columns, of a warp's 16 rows.
  __device__ __forceinline__ static int row(int warp) {
    return kColumnBlocks == 1 ? warp * 16 : warp % kWarpsOfColumns * 16;
  }
  __device__ __forceinline__ static int column_block(int warp) {
    return kColumnBlocks == 1 ? 0 : warp / kWarpsOfColumns;
  }
};

/// A pair's CTA has half of dq's columns, which are in kBlocks blocks of 64 from number kFirst * rank on. Of three
/// blocks both CTAs have the second, and half of its columns each.
template <typename Traits>
struct PairShare {
  static constexpr int kBlocks = (Traits::kQkDim + 64) / 128, kFirst = Traits::kQkDim / 128;
};

/// A part of a key tile's dk or dv, kKeys x kDim: each 16 keys follow the 16 before, with all their columns as in
/// DqBlocks.
template <int kKeys, int kDim>
struct KeyFragments {
  static constexpr int kSlabFloats = 16 * kDim, kTileFloats = kKeys * kDim;
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

/// The producer's announcement of a tile, or of the end of a work tile or of all work tiles.
struct Tile {
  enum Flag : uint32_t {
    kPartial = 1,  ///< some elements are hidden
    kFirst = 2,    ///< its work tile's first
    kAlone = 4,    ///< no other key tile contributes to the query tile's dq, which is no sum of integers
    kNothing = 8,  ///< the work tile has no tiles
    kEnd = 16,     ///< there are no more work tiles
  };
  uint32_t flags;
  int32_t key_tile;
  uint32_t head_group;  ///< see BackwardParams
  QueryTile query;
};

/// The visible elements of a tile's column, a bit for each row, ordered so that a consumer lane's bits are adjacent:
/// lane l has the scores of rows 8a + 2(l % 4) + b, and bit 8(l % 4) + 2a + b of a word is row 8a + 2(l % 4) + b of its
/// 32.
template <int kRows>
struct alignas(8) ColumnBits {
  uint32_t word[kRows / 32];

  /// A word of them from one whose bit r is row r.
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

/// Extra storage when dP is computed in halves: dS has one stage, and the ones for the scores' biases take no
/// registers. `ones`: memory holds 8 of the operand's 64 rows; sanitizers count all 64, so other storage follows.
struct HalvesStorage {
  ScoreOnes ones;
  uint64_t ds_empty;
};
struct NoStorage {};

/// Extra storage of a CTA that shares rows with another one.
struct SharedRowsStorage {
  uint64_t claim_full, claim_empty;
  uint64_t part_full;   ///< the other CTA's part of dk and dv is here
  uint64_t part_empty;  ///< this CTA's may be sent
  uint32_t claim;       ///< in the second CTA: what the first has claimed
};
struct NoSharedRows {};

template <typename Traits>
struct SharedStorage {
  using Element = typename Traits::Element;
  alignas(1024) Element k[Traits::kKeys * Traits::kQkColumns];
  alignas(1024) Element v[Traits::kKeys * Traits::kVColumns];
  alignas(1024) Element q[Traits::kStages][Traits::kRows * Traits::kQkColumns];
  alignas(1024) Element dout[Traits::kDoutStages][Traits::kRows * Traits::kVColumns];
  /// dS, [rows, keys] as rows of 64 keys of each warpgroup; two stages, so that one barrier of the consumers a tile is
  /// enough, or one stage if there is no room.
  alignas(1024) Element ds[Traits::kDsStages][Traits::kRows * Traits::kKeys];
  /// Staging tiles, one of each consumer warp: for a work tile's dk and dv on their way out, and until then for a
  /// tile's dq.
  alignas(1024) float staging[Traits::kConsumerWarps][Traits::kStagingFloats];
  [[no_unique_address]] std::conditional_t<kHalves<Traits>, HalvesStorage, NoStorage> halves;
  [[no_unique_address]] std::conditional_t<Traits::kSharesRows, SharedRowsStorage, NoSharedRows> pair;
  alignas(128) RowBias biases[Traits::kStages][Traits::kRows];
  ColumnBits<Traits::kRows> mask_bits[Traits::kStages][Traits::kKeys];
  ColumnBounds<Traits::kKeys> bounds;  ///< the current work tile's; used by the mask warp alone
  Tile tile[Traits::kStages];
  uint64_t tile_full[Traits::kStages], mask_full[Traits::kStages];
  uint64_t scores_full[Traits::kStages];  ///< dS is written, and all consumer lanes have read the announcement
  uint64_t q_full[Traits::kStages], q_empty[Traits::kStages];
  uint64_t dout_full[Traits::kDoutStages], dout_empty[Traits::kDoutStages];  ///< with the first tile, V too
  uint64_t dq_full[Traits::kStages], dq_empty;
  uint64_t k_full, kv_empty;
  uint64_t padded_full;
};

}  // namespace flashmask::sm90::bwd
