// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <type_traits>

#include "backends/cuda/fragments/policies.cuh"
#include "backends/cuda/sm80/backward/params.h"
#include "backends/cuda/sm80/common/shared_tile.cuh"
#include "backends/cuda/sm80/tile_config.h"

namespace flashmask::sm80::bwd {

/// Divides a product of kRows x kColumns among kRowWarps by kColumnWarps warps of a CTA. A warp has slabs of 16 rows
/// and pieces of 16 columns.
template <int kWarps, int kRows, int kColumns, int kColumnWarps_>
struct WarpGrid {
  static constexpr int kColumnWarps = kColumnWarps_, kRowWarps = kWarps / kColumnWarps;
  static constexpr int kSlabs = kRows / 16 / kRowWarps, kPieces = kColumns / 16 / kColumnWarps;
  static_assert(kSlabs * kRowWarps * 16 == kRows && kPieces * kColumnWarps * 16 == kColumns);
  /// A thread's fragments of the matrix.
  using Fragments = float[kSlabs][8 * kPieces];

  int row, column;  ///< the calling warp's place among the warps
  __device__ __forceinline__ explicit WarpGrid(int warp) : row(warp / kColumnWarps), column(warp % kColumnWarps) {}
};

/// One configuration of the backward kernel: an element type, a row of kBackwardTiles, and a variant.
template <typename Element_, int kHeadDim, int kHeadDimV, int kKilobytes, cuda::Variant variant>
struct BackwardTraits {
  using Element = Element_;
  using Params = std::conditional_t<variant.scores, ScoredBackwardParams, BackwardParams>;
  using Score = cuda::ScoreOf<Element, variant>;
  using Weights = cuda::WeightsOf<variant>;
  static constexpr BackwardTile kTile = find_tile(kBackwardTiles, kHeadDim, kHeadDimV, kKilobytes);
  static constexpr int kQkDim = kHeadDim, kVDim = kHeadDimV;
  static constexpr int kRows = kTile.rows, kKeys = kTile.keys;
  static constexpr int kWarps = BackwardTile::kWarps, kThreads = 32 * kWarps;
  static constexpr int kQBuffers = kTile.q_buffers, kDoutBuffers = kTile.dout_buffers;
  static_assert(kDoutBuffers <= kQBuffers && kQBuffers <= 2);
  static constexpr int kVRegisterColumns = kTile.v_register_columns;
  /// In the plan's units of 64 rows x 128 keys: granules that a tile has, or tiles that a granule or a key block has.
  static constexpr int kGranules = kTile.plan_rows() / 64, kTilesOfGranule = kTile.plan_rows() / kRows,
                       kTilesOfBlock = 128 / kKeys;
  static_assert(kGranules * 64 == kTile.plan_rows() && kTilesOfGranule * kRows == kTile.plan_rows());

  using QTile = SharedTile<Element, kRows, kQkDim>;
  using DoutTile = SharedTile<Element, kRows, kVDim>;
  using KTile = SharedTile<Element, kKeys, kQkDim>;
  using VTile = SharedTile<Element, kKeys, kVDim>;
  using SharedVTile = SharedTile<Element, kKeys, kVDim - kVRegisterColumns>;  ///< V's columns in shared memory
  using ScoreTile = SharedTile<Element, kRows, kKeys>;                        ///< P, and dS

  /// S and dP: neighbouring rows and keys of a warp.
  using ScoreGrid = WarpGrid<kWarps, kRows, kKeys, kTile.score_warps()>;
  /// dK, dV and dQ: a warp's slabs and pieces are as far apart as there are warps, so that their places differ from the
  /// first one's by what is known at compile time, see PieceReader.
  using DkGrid = WarpGrid<kWarps, kKeys, kQkDim, kTile.gradient_warps(kQkDim)>;
  using DvGrid = WarpGrid<kWarps, kKeys, kVDim, kTile.gradient_warps(kVDim)>;
  using DqGrid = WarpGrid<kWarps, kRows, kQkDim, kTile.dq_warps()>;
};

/// Layout of a row tile's dq in its sums: warp by warp, slab by slab and piece by piece the values of the threads'
/// fragments, with a value's 32 lanes side by side.
template <typename Traits>
struct DqFragments {
  using Grid = typename Traits::DqGrid;
  static constexpr int kOfPiece = 8 * 32, kOfSlab = Grid::kPieces * kOfPiece, kOfWarp = Grid::kSlabs * kOfSlab,
                       kOfTile = Traits::kWarps * kOfWarp;
  static_assert(kOfTile == Traits::kRows * Traits::kQkDim);

  __device__ __forceinline__ static int64_t first(int64_t tile, int warp, uint32_t lane) {
    return tile * kOfTile + warp * kOfWarp + static_cast<int>(lane);
  }
};

template <typename Traits>
struct SharedStorage {
  alignas(128) unsigned char k[Traits::KTile::kBytes];
  alignas(128) unsigned char v[Traits::SharedVTile::kBytes];
  alignas(128) unsigned char q[Traits::kQBuffers][Traits::QTile::kBytes];
  alignas(128) unsigned char dout[Traits::kDoutBuffers][Traits::DoutTile::kBytes];
  alignas(128) unsigned char p[Traits::ScoreTile::kBytes];
  alignas(128) unsigned char ds[Traits::ScoreTile::kBytes];
  alignas(16) RowTerms terms[Traits::kQBuffers][Traits::kRows];
  uint32_t work_tile;  ///< the one that thread 0 has claimed
  int32_t row_end;     ///< end of its batch entry: rows from there on count as zeros
};

}  // namespace flashmask::sm80::bwd
