// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/cuda/device/variant.h"

namespace flashmask::sm90 {

/// Prefix of the kernels' ids.
inline constexpr const char* kArch = "sm90";

// The tiles of Hopper's kernels: a row for each combination of head dims that has kernels and, in the forward, for each
// number of consumer warpgroups. The build makes kernels of each row for each element type; dispatch refuses a call
// without a row; the library reports its support from here. CMake reads these rows and the variants', too: a tile's
// begins with ForwardTile{ or BackwardTile{, head_dim, head_dim_v, consumers, features.
using cuda::DqSum, cuda::TileFeatures, cuda::Unit, cuda::VariantRow;
using enum TileFeatures;
using enum Unit;

/// Limits of compute capability 9.0.
inline constexpr int kSharedBytesOfBlock = 227 * 1024, kRegistersOfBlock = 64 * 1024, kThreadsOfWarpgroup = 128;

struct ForwardTile {
  int head_dim, head_dim_v;
  int consumers;  ///< consumer warpgroups, each with 64 query rows of the tile
  TileFeatures features;
  int keys;
  int q_buffers;  ///< tiles of Q in flight; with one, the next work tile's rows wait for this one's last QK^T
  /// Tiles of K in flight, and in how many parts, each of some columns, a tile comes and goes.
  int k_tiles, k_parts;
  /// Parts of V in flight, each of some keys, and how many make a tile.
  int v_slots, v_parts;
  int producer_registers, consumer_registers;  ///< per thread, after the warpgroups have exchanged them
  /// Rows of at least this many tiles run with P V under the next tile's softmax; 0: none does. It pays where the
  /// exponentials take as long as the products, and not in short rows.
  int overlap_from;
  /// Makes the warpgroups issue their products in turn, one tile each, so that one's softmax runs under the others'
  /// products: in rows that overlap, or in all rows if overlap_from is 0.
  bool turns;
  /// Buffers for mask bits of each warpgroup, and the rows of a granule that one takes: where shared memory is full,
  /// the halves of a granule go through one small buffer in turn.
  int mask_slots, mask_rows;
  /// Fills all 64-column blocks of a buffer in one copy. Otherwise each has its own, and rows may end in any block.
  bool one_copy;

  /// Products of a tile that are as long or wide as head_dim, and as head_dim_v.
  static constexpr int kProductsOfQk = 1, kProductsOfV = 1;
  constexpr int rows() const { return 64 * consumers; }
  /// Draws dropout bits half a tile at a time, once that half's scores have become weights: earlier, S, O and a draw do
  /// not fit the registers.
  constexpr bool draws_late() const { return head_dim_v >= 256; }
};

struct BackwardTile {
  int head_dim, head_dim_v;
  int consumers;  ///< consumer warpgroups, each with 64 keys of the tile
  TileFeatures features;
  int rows;
  int stages;                                ///< tiles of Q, and of dO, in flight
  int helper_registers, consumer_registers;  ///< per thread, after the warpgroups have exchanged them
  /// Makes each warpgroup compute dQ of every other tile instead of half of every dQ. They then drift apart, so that
  /// one's products run beside the other's exponentials; at d = 128, where a whole dQ has to wait for dK, that gains
  /// nothing.
  bool alternate;
  /// Runs both warpgroups on one copy of the code; otherwise each has a copy in which its number is a constant. One
  /// copy, half as much for instruction caches to hold, is faster at d = 64, two are at d = 128.
  bool one_code;
  /// Fills all 64-column blocks of a buffer in one copy. Otherwise each has its own, and rows may end in any block.
  bool one_copy;
  /// Makes the warpgroups share their keys and divide the columns of dk and dv, if dk and dv of 64 keys do not fit a
  /// warpgroup's registers.
  bool wide;
  int dout_stages;
  /// Computes dP in two halves of a tile's rows, one after the other, and keeps dS in shared memory only, if registers
  /// have no room for more beside dk and dv.
  bool halves;
  /// Makes the consumers of a wide tile keep operands in registers, and half of a dq until the next tile, and add dq to
  /// its sums from there. Otherwise dq goes through staging tiles and store warps, which takes time of shared memory.
  bool dq_from_registers;
  /// Has a wide tile's kernels of plain calls run in pairs: see runs_in_pairs.
  bool pairs;

  /// Products of a tile that are as long or wide as head_dim, and as head_dim_v.
  static constexpr int kProductsOfQk = 3, kProductsOfV = 2;
  /// True if a kernel runs in clusters of two CTAs, a pair: each has one of a block's key tiles, and half of the
  /// columns of the block's dq. Other kernels would take more registers.
  constexpr bool runs_in_pairs(DqSum sum, bool split) const { return pairs && sum != DqSum::kEither && !split; }
  constexpr int keys() const { return wide ? 64 : 64 * consumers; }
  /// Parts of a tile's dq that are added up for themselves.
  constexpr int dq_pieces() const { return wide && !dq_from_registers ? consumers : 1; }
  /// Columns of a block of dq, as it leaves a warpgroup: 64, or all that the warpgroup computes.
  constexpr int dq_columns() const {
    const int own = wide || alternate ? head_dim : head_dim / consumers;
    return own % 64 == 0 || wide ? 64 : own;
  }
};

// Three warpgroups do more work per byte of K and V, but have no registers for dropout's bits beside their scores; two
// make smaller work tiles, which short problems need to fill the device. The shortest tile of a pair of head dims comes
// first.
inline constexpr ForwardTile kForwardTiles[] = {
    // d, d_v, WGs, features  keys  Q  K     V     registers  overlap, turns  mask slots, rows  one copy
    ForwardTile{64, 64, 2, kAll, 128, 2, 4, 1, 4, 1, 40, 232, 5, true, 2, 64, true},
    ForwardTile{64, 64, 3, kNoDropout, 128, 2, 4, 1, 4, 1, 32, 160, 5, true, 2, 64, true},
    ForwardTile{96, 96, 2, kAll, 128, 2, 2, 1, 2, 1, 40, 232, 0, false, 1, 32, false},
    ForwardTile{96, 96, 3, kNoDropout, 128, 2, 2, 1, 2, 1, 32, 160, 0, false, 1, 32, false},
    ForwardTile{128, 128, 2, kAll, 128, 2, 2, 1, 2, 1, 40, 232, 0, false, 1, 32, true},
    ForwardTile{128, 128, 3, kNoDropout, 128, 2, 2, 1, 2, 1, 32, 160, 0, false, 1, 32, true},
    ForwardTile{192, 128, 2, kAll, 128, 1, 2, 1, 2, 1, 40, 232, 5, true, 2, 64, false},
    ForwardTile{192, 128, 3, kNoDropout, 128, 1, 2, 1, 3, 2, 32, 160, 0, true, 2, 64, false},
    ForwardTile{192, 192, 2, kAll, 128, 1, 2, 1, 3, 2, 40, 232, 5, true, 2, 64, false},
    ForwardTile{256, 256, 2, kAll, 128, 1, 1, 2, 3, 2, 40, 232, 0, true, 1, 32, false},
};

// 192 / 128 has no registers left for other scores and dropout: such calls run in the smallest other tile that holds
// them.
inline constexpr BackwardTile kBackwardTiles[] = {
    // d, d_v, WGs, features  rows  stages  registers  alternate  one code  one copy  wide  dO's stages  halves  dq from
    // registers  pairs
    BackwardTile{64, 64, 2, kAllAndSharedRows, 128, 2, 40, 232, true, true, true, false, 2, false, false, false},
    BackwardTile{96, 96, 2, kAll, 64, 2, 40, 232, true, true, false, false, 2, false, false, false},
    BackwardTile{128, 128, 2, kAllAndSharedRows, 64, 2, 40, 232, false, false, true, false, 2, false, false, false},
    BackwardTile{192, 128, 2, kNone, 64, 2, 24, 240, false, false, false, false, 1, true, false, false},
    BackwardTile{192, 192, 2, kAll, 64, 2, 24, 240, false, false, false, true, 2, false, true, true},
    BackwardTile{256, 256, 2, kAll, 64, 2, 40, 232, false, false, false, true, 1, false, false, true},
};

using ForwardVariant = VariantRow;
using BackwardVariant = VariantRow;
// clang-format off: the build reads a row from each line
inline constexpr ForwardVariant kForwardVariants[] = {
    // unit, tiles, end of the id
    ForwardVariant{kPlain, kAny, "", {}},
    ForwardVariant{kPlain, kAny, ".sink.pos", {.sink = true, .positions = true}},
    ForwardVariant{kFeatures, kAll, ".score.dropout.sink.pos",
                   {.scores = true, .dropout = true, .sink = true, .positions = true}},
    ForwardVariant{kFeatures, kNoDropout, ".score.sink.pos", {.scores = true, .sink = true, .positions = true}},
    ForwardVariant{kPartial, kAny, ".sink.pos.partial", {.sink = true, .positions = true, .partial = true}},
};
// A sink's weight is in lse, so none of them asks for it.
inline constexpr BackwardVariant kBackwardVariants[] = {
    // unit, tiles, end of the id
    BackwardVariant{kPlain, kAny, "", {}},
    BackwardVariant{kPlain, kAny, ".split", {.split = true}},
    BackwardVariant{kPlain, kAny, ".deterministic", {.sum = DqSum::kIntegers}},
    BackwardVariant{kPlain, kAny, ".deterministic.split", {.sum = DqSum::kIntegers, .split = true}},
    BackwardVariant{kPlain, kAny, ".pos", {.sum = DqSum::kEither, .positions = true}},
    BackwardVariant{kPlain, kAny, ".pos.split", {.sum = DqSum::kEither, .positions = true, .split = true}},
    BackwardVariant{kFeatures, kAll, ".score.pos", {.sum = DqSum::kEither, .scores = true, .positions = true}},
    BackwardVariant{kFeatures, kAll, ".score.pos.split",
                    {.sum = DqSum::kEither, .scores = true, .positions = true, .split = true}},
    BackwardVariant{kFeatures, kAll, ".score.dropout.pos",
                    {.sum = DqSum::kEither, .scores = true, .dropout = true, .positions = true}},
    BackwardVariant{kFeatures, kAll, ".score.dropout.pos.split",
                    {.sum = DqSum::kEither, .scores = true, .dropout = true, .positions = true, .split = true}},
    BackwardVariant{kPlain, kAllAndSharedRows, ".shared", {.shares_rows = true}},
};
// clang-format on

/// The row of a table. A combination that has none does not compile: the search for it ends past the table, which is no
/// constant expression.
template <typename Tile, std::size_t kCount>
constexpr Tile find_tile(const Tile (&table)[kCount], int head_dim, int head_dim_v, int consumers) {
  std::size_t row = 0;
  while (table[row].head_dim != head_dim || table[row].head_dim_v != head_dim_v || table[row].consumers != consumers)
    ++row;
  return table[row];
}

/// True if the registers of one warpgroup of helpers and of `consumers` others are multiples of the hardware's step and
/// fit the registers that their block begins with. A warpgroup that asks for more would wait forever.
constexpr bool registers_fit(int helper_registers, int consumer_registers, int consumers) {
  const bool steps =
      helper_registers % 8 == 0 && consumer_registers % 8 == 0 && helper_registers >= 24 && consumer_registers <= 240;
  const int warpgroups = consumers + 1, at_first = kRegistersOfBlock / (kThreadsOfWarpgroup * warpgroups) / 8 * 8;
  return steps && helper_registers + consumers * consumer_registers <= warpgroups * at_first;
}

}  // namespace flashmask::sm90
