// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

namespace flashmask::sm80 {

/// What the ids of the kernels begin with.
inline constexpr const char* kArch = "sm80";

// The tiles of the kernels of mma.sync: a row for each combination of head dims that there are kernels for, and of the
// shared memory that a block may have. The build makes kernels of each row for each element type; dispatch, refusals and
// what the library says it supports are read from here. CMake reads the rows, too: each begins with ForwardTile{ or
// BackwardTile{, head_dim, head_dim_v, kilobytes.

/// The kilobytes of shared memory that a block may have: on compute capability 8.0 and 8.7, and on 8.6, 8.9 and 12.0.
inline constexpr int kLargeKilobytes = 163, kSmallKilobytes = 99;

/// A CTA's tile of the forward. Keys come 128 at a time, as the plan has them, in steps of `keys`, for which there is
/// one buffer of K and one of V.
struct ForwardTile {
  int head_dim, head_dim_v;
  int kilobytes;  ///< of shared memory that a block needs at most: one of the two above
  int rows, keys, warps;
  int ctas;  ///< of a multiprocessor, for which the registers of a thread are limited

  /// Products of a tile that are as long or wide as head_dim, and as head_dim_v.
  static constexpr int kProductsOfQk = 1, kProductsOfV = 1;
  constexpr int rows_of_warp() const { return rows / warps; }
};

// Each warp reads all of K and V from shared memory. With 32 rows it does so for two products at a time, where O and S
// of so many rows fit the registers. Rows of 99 kilobytes run everywhere; of one pair of head dims the largest that the
// device takes is chosen.
inline constexpr ForwardTile kForwardTiles[] = {
    // d, d_v, KB          rows keys warps CTAs
    ForwardTile{64, 64, 99, 128, 128, 4, 2},
    ForwardTile{96, 96, 99, 128, 64, 4, 2},
    ForwardTile{128, 128, 99, 64, 64, 4, 2},
    ForwardTile{128, 128, 163, 128, 64, 4, 2},
    ForwardTile{192, 128, 99, 128, 64, 8, 1},
    ForwardTile{192, 192, 99, 128, 64, 8, 1},
    ForwardTile{256, 256, 99, 64, 64, 4, 1},
    ForwardTile{256, 256, 163, 128, 64, 8, 1},
};

/// The row of a table. A combination that has none does not compile: the search for it ends past the table, which is no
/// constant expression.
template <typename Tile, std::size_t kCount>
constexpr Tile find_tile(const Tile (&table)[kCount], int head_dim, int head_dim_v, int kilobytes) {
  std::size_t row = 0;
  while (table[row].head_dim != head_dim || table[row].head_dim_v != head_dim_v || table[row].kilobytes != kilobytes)
    ++row;
  return table[row];
}

/// Whether the kernels of a tile take rows of `dim` where it has `dim_of_tile`: what a tile has more is zeros in shared
/// memory.
template <typename Tile>
constexpr bool holds(const Tile&, long dim, long dim_of_tile) {
  return dim % 8 == 0 && dim <= dim_of_tile;
}

}  // namespace flashmask::sm80
