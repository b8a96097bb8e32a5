// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include "backends/cuda/device/variant.h"

namespace flashmask::sm80 {

/// Prefix of the kernels' ids.
inline constexpr const char* kArch = "sm80";

// The tiles of the kernels of mma.sync: a row for each combination of head dims that there are kernels for, and of the
// shared memory that a block may have. The build makes kernels of each row for each element type; dispatch, refusals
// and what the library says it supports are read from here. CMake reads the rows, too: each begins with ForwardTile{ or
// BackwardTile{, head_dim, head_dim_v, kilobytes, features; and the rows of the variants.
using cuda::TileFeatures, cuda::Unit, cuda::VariantRow;
using enum TileFeatures;
using enum Unit;

/// The kilobytes of shared memory that a block may have: on compute capability 8.0 and 8.7, and on 8.6, 8.9 and 12.0.
inline constexpr int kLargeKilobytes = 163, kSmallKilobytes = 99;

/// A CTA's tile of the forward. Keys come 128 at a time, as the plan has them, in steps of `keys`, for which there is
/// one buffer of K and one of V.
struct ForwardTile {
  int head_dim, head_dim_v;
  int kilobytes;  ///< shared memory that a block needs at most: one of the two above
  TileFeatures features;
  int rows, keys, warps;
  int ctas;  ///< CTAs of a multiprocessor, for which the registers of a thread are limited

  /// Products of a tile that are as long or wide as head_dim, and as head_dim_v.
  static constexpr int kProductsOfQk = 1, kProductsOfV = 1;
  constexpr int rows_per_warp() const { return rows / warps; }
};

// Each warp reads all of K and V from shared memory. With 32 rows it does so for two products at a time, if O
// and S of 32 rows fit in registers. Rows of 99 kilobytes run everywhere. Among the rows of one pair of head dims,
// the chosen one gives a multiprocessor of the device most warps, then most CTAs: two CTAs of four warps wait for each
// other less than eight warps that share barriers.
// clang-format off: the build reads a row from each line
inline constexpr ForwardTile kForwardTiles[] = {
    // d, d_v, KB, features  rows keys warps CTAs
    ForwardTile{64, 64, 99, kAll, 128, 128, 4, 2},
    ForwardTile{96, 96, 99, kAll, 128, 64, 4, 2},
    ForwardTile{128, 128, 99, kAll, 64, 64, 4, 2},
    ForwardTile{128, 128, 163, kAll, 128, 64, 4, 2},
    ForwardTile{192, 128, 99, kAll, 128, 64, 8, 1},
    ForwardTile{192, 192, 99, kAll, 128, 64, 8, 1},
    ForwardTile{192, 192, 163, kAll, 64, 64, 4, 2},
    ForwardTile{256, 256, 99, kAll, 64, 64, 4, 1},
    ForwardTile{256, 256, 163, kAll, 128, 64, 8, 1},
};
// clang-format on

/// A CTA's tile of the backward: `rows` query rows and `keys` keys at a time.
struct BackwardTile {
  int head_dim, head_dim_v;
  int kilobytes;  ///< as ForwardTile's
  TileFeatures features;
  int rows, keys;
  int q_buffers, dout_buffers;  ///< tiles of Q, and of dO, in shared memory
  int v_register_columns;       ///< columns of V that lie in registers, as the operand of dP, and not in shared memory

  static constexpr int kWarps = 8;
  /// Products of a tile that are as long or wide as head_dim, and as head_dim_v.
  static constexpr int kProductsOfQk = 3, kProductsOfV = 2;
  /// Rows of a tile of the plan: whole granules.
  constexpr int plan_rows() const { return rows < 64 ? 64 : rows; }
  // Number of warps that divide the columns of a product: keys of S and dP, head dims of dK and dV, and of dQ. Up
  // to two warps share a block of 32 columns in shared memory, up to four a block of 64.
  constexpr int score_warps() const { return rows == 128 || (rows == 64 && keys == 64) ? 2 : 4; }
  constexpr int gradient_warps(int dim) const { return keys == 128 || dim % 64 != 0 ? 2 : 4; }
  constexpr int dq_warps() const { return rows == 128 || head_dim % 64 != 0 ? 2 : 4; }
};

// More keys take fewer additions to dq, more rows fewer reads of K and V from shared memory. Calls with other scores or
// dropout run in the least tile with kernels of them that holds their head dims.
// clang-format off: the build reads a row from each line
inline constexpr BackwardTile kBackwardTiles[] = {
    // d, d_v, KB, features  rows keys Q dO  columns of V in registers
    BackwardTile{64, 64, 99, kAll, 64, 128, 2, 2, 0},
    BackwardTile{64, 64, 163, kNone, 128, 128, 2, 2, 0},
    BackwardTile{96, 96, 99, kNone, 64, 64, 2, 2, 0},
    BackwardTile{96, 96, 163, kNone, 64, 128, 2, 2, 0},
    BackwardTile{128, 128, 99, kAll, 64, 64, 2, 1, 0},
    BackwardTile{128, 128, 163, kNone, 64, 128, 2, 2, 0},
    BackwardTile{192, 128, 99, kNone, 64, 64, 1, 1, 0},
    BackwardTile{192, 128, 163, kNone, 64, 64, 2, 2, 0},
    BackwardTile{192, 192, 99, kNone, 32, 64, 2, 1, 0},
    BackwardTile{192, 192, 163, kNone, 64, 64, 2, 2, 0},
    BackwardTile{256, 256, 99, kAll, 32, 64, 2, 1, 192},
    BackwardTile{256, 256, 163, kNone, 64, 64, 1, 1, 0},
};
// clang-format on

using ForwardVariant = VariantRow;
using BackwardVariant = VariantRow;
// Partial results and deterministic mode are branches of every kernel.
// clang-format off: the build reads a row from each line
inline constexpr ForwardVariant kForwardVariants[] = {
    // unit, tiles, end of the id
    ForwardVariant{kPlain, kAny, "", {}},
    ForwardVariant{kPlain, kAny, ".score.dropout.sink.pos",
                   {.scores = true, .dropout = true, .sink = true, .positions = true}},
};
// Every kernel reads positions, and a sink's weight is in lse, so none of them asks for either.
inline constexpr BackwardVariant kBackwardVariants[] = {
    // unit, tiles, end of the id
    BackwardVariant{kPlain, kAny, "", {}},
    BackwardVariant{kFeatures, kAll, ".score.dropout", {.scores = true, .dropout = true}},
};
// clang-format on

/// The row of a table. A combination that has none does not compile: the search for it ends past the table, which is no
/// constant expression.
template <typename Tile, std::size_t kCount>
constexpr Tile find_tile(const Tile (&table)[kCount], int head_dim, int head_dim_v, int kilobytes) {
  std::size_t row = 0;
  while (table[row].head_dim != head_dim || table[row].head_dim_v != head_dim_v || table[row].kilobytes != kilobytes)
    ++row;
  return table[row];
}

/// True if a tile's kernels take rows of `dim` in place of `dim_of_tile`: the rest of a row is zeros in shared memory.
template <typename Tile>
constexpr bool holds(const Tile&, long dim, long dim_of_tile) {
  return dim % 8 == 0 && dim <= dim_of_tile;
}

}  // namespace flashmask::sm80
