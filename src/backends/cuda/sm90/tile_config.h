// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/cuda/device/variant.h"

namespace flashmask::sm90 {

/// What the ids of the kernels begin with.
inline constexpr const char* kArch = "sm90";

// The tiles of Hopper's kernels: a row for each combination of head dims that there are kernels for, and, in the
// forward, of consumer warpgroups. The build makes kernels of each row for each element type, dispatch looks here, what
// has no row is refused, and what the library says it supports is read from here. CMake reads the rows, too: each
// begins with ForwardTile{ or BackwardTile{, head_dim, head_dim_v, consumers, features; and those of the variants.
using cuda::DqSum, cuda::TileFeatures, cuda::Unit, cuda::VariantRow;
using enum TileFeatures;
using enum Unit;

/// What a multiprocessor of compute capability 9.0 has.
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
  int producer_registers, consumer_registers;  ///< of a thread, after the warpgroups have exchanged them
  /// Rows of at least this many tiles run with P V under the next tile's softmax; 0: none does. It pays where the
  /// exponentials take as long as the products, and not in short rows.
  int overlap_from;
  /// Whether the warpgroups issue their products in turn, one tile each, so that one's softmax runs under the others'
  /// products: in the rows that overlap, or where none does in all.
  bool turns;
  /// Buffers for mask bits of each warpgroup, and the rows of a granule that one takes: where shared memory is full,
  /// the halves of a granule go through one small buffer in turn.
  int mask_slots, mask_rows;
  /// Whether one copy fills the blocks of 64 columns of a buffer, or one each: then rows may end in any of them.
  bool one_copy;

  /// Products of a tile that are as long or wide as head_dim, and as head_dim_v.
  static constexpr int kProductsOfQk = 1, kProductsOfV = 1;
  constexpr int rows() const { return 64 * consumers; }
  /// Whether it draws those bits half a tile at a time, when a half's scores have become weights: before, S, O and a
  /// draw do not fit the registers.
  constexpr bool draws_late() const { return head_dim_v >= 256; }
};

struct BackwardTile {
  int head_dim, head_dim_v;
  int consumers;  ///< consumer warpgroups, each with 64 keys of the tile
  TileFeatures features;
  int rows;
  int stages;                                ///< tiles of Q, and of dO, in flight
  int helper_registers, consumer_registers;  ///< of a thread, after the warpgroups have exchanged them
  /// Whether one warpgroup computes a tile's dQ and the other the next tile's, or each half of every one. Alternating
  /// they drift apart, so that one's products run beside the other's exponentials; at d = 128, where a whole dQ has to
  /// wait for dK, that gains nothing.
  bool alternate;
  /// Whether both warpgroups run the same code, or each a copy in which its number is a constant. One copy, half of
  /// what instruction caches have to hold, is faster at d = 64, two are at d = 128.
  bool one_code;
  /// Whether one copy fills the blocks of 64 columns of a buffer, or one each: then rows may end in any of them.
  bool one_copy;
  /// Whether the warpgroups share the same keys, and divide the columns of dk and dv instead: where those of 64 keys do
  /// not fit a warpgroup's registers.
  bool wide;
  int dout_stages;
  /// Whether dP comes in two halves of a tile's rows, one after the other, and dS goes to shared memory alone: where
  /// the registers have no room for more beside dk and dv.
  bool halves;
  /// Of a wide tile, whether the consumers add dq to its sums from registers, or by way of staging tiles and store
  /// warps. The former takes registers, for half of a dq until the next tile, the latter shared memory's time.
  bool dq_from_registers;

  /// Products of a tile that are as long or wide as head_dim, and as head_dim_v.
  static constexpr int kProductsOfQk = 3, kProductsOfV = 2;
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

// 192 / 128 has no registers left for softcap and dropout: such calls run in the least of the others that holds them.
inline constexpr BackwardTile kBackwardTiles[] = {
    // d, d_v, WGs, features  rows  stages  registers  alternate  one code  one copy  wide  dO's stages  halves  dq from
    // registers
    BackwardTile{64, 64, 2, kAll, 128, 2, 40, 232, true, true, true, false, 2, false, false},
    BackwardTile{96, 96, 2, kAll, 64, 2, 40, 232, true, true, false, false, 2, false, false},
    BackwardTile{128, 128, 2, kAll, 64, 2, 40, 232, false, false, true, false, 2, false, false},
    BackwardTile{192, 128, 2, kNone, 64, 2, 24, 240, false, false, false, false, 1, true, false},
    BackwardTile{192, 192, 2, kAll, 64, 2, 24, 240, false, false, false, true, 2, false, true},
    BackwardTile{256, 256, 2, kAll, 64, 2, 40, 232, false, false, false, true, 1, false, false},
};

using ForwardVariant = VariantRow;
using BackwardVariant = VariantRow;
// clang-format off: the build reads a row from each line
inline constexpr ForwardVariant kForwardVariants[] = {
    // unit, tiles, end of the id
    ForwardVariant{kPlain, kAny, "", {}},
    ForwardVariant{kPlain, kAny, ".sink.pos", {.sink = true, .positions = true}},
    ForwardVariant{kFeatures, kAll, ".softcap.dropout.sink.pos",
                   {.softcap = true, .dropout = true, .sink = true, .positions = true}},
    ForwardVariant{kFeatures, kNoDropout, ".softcap.sink.pos", {.softcap = true, .sink = true, .positions = true}},
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
    BackwardVariant{kFeatures, kAll, ".softcap.dropout.pos",
                    {.sum = DqSum::kEither, .softcap = true, .dropout = true, .positions = true}},
    BackwardVariant{kFeatures, kAll, ".softcap.dropout.pos.split",
                    {.sum = DqSum::kEither, .softcap = true, .dropout = true, .positions = true, .split = true}},
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

/// Whether the registers of one warpgroup of helpers and of `consumers` others fit those that a block of them begins
/// with, in the steps in which they are handed out. There are no more to exchange: a warpgroup would wait for them
/// forever.
constexpr bool registers_fit(int helper_registers, int consumer_registers, int consumers) {
  const bool steps =
      helper_registers % 8 == 0 && consumer_registers % 8 == 0 && helper_registers >= 24 && consumer_registers <= 240;
  const int warpgroups = consumers + 1, at_first = kRegistersOfBlock / (kThreadsOfWarpgroup * warpgroups) / 8 * 8;
  return steps && helper_registers + consumers * consumer_registers <= warpgroups * at_first;
}

}  // namespace flashmask::sm90
