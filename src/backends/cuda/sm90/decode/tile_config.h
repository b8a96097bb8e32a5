// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/device/variant.h"
#include "backends/cuda/sm90/tile_config.h"

namespace flashmask::sm90 {

/// A tile of the kernels over caches: 64 packed rows of a request for each consumer warpgroup, and 128 keys. CMake
/// reads this table's rows and the variants' as it reads those of kForwardTiles.
struct DecodeTile {
  int head_dim, head_dim_v;
  int consumers;  ///< consumer warpgroups; two are for requests of many rows
  TileFeatures features;
  int slots;      ///< each of the rings has that keys and values go through
  int parts;      ///< slots that a tile's keys, and its values, take
  int queries;    ///< units whose rows are in flight
  int masks;      ///< tiles whose mask bits are
  bool overlaps;  ///< runs P V under the next tile's S and softmax
  bool turns;     ///< as ForwardTile's
  int ctas;       ///< a multiprocessor has, so that one's softmax runs under the other's products where both are short
  int copies;     ///< slots for copies of 32 keys of e4m3, and of 32 values; 0: no kernel reads such caches

  static constexpr int kProductsOfQk = 1, kProductsOfV = 1;
  static constexpr bool one_copy = false;
  constexpr int rows() const { return 64 * consumers; }
  /// Keys, or values, that are copied at a time: of e4m3 as many as a warp has lanes, each of which looks up a page.
  constexpr int copied_keys(bool float8) const { return float8 ? 32 : 128 / parts; }
  /// Packed rows that lie where a thread has one of them. Tall tiles are for many.
  constexpr int spread_rows() const { return consumers == 1 ? 32 : 0; }
};

// clang-format off: the build reads a row from each line
inline constexpr DecodeTile kDecodeTiles[] = {
    // d, d_v, WGs, features  slots  parts  queries  masks  overlaps, turns  CTAs  copies
    DecodeTile{64, 64, 1, kAll, 2, 1, 2, 2, false, false, 2, 0},
    DecodeTile{64, 64, 2, kAllAndFloat8, 4, 1, 2, 2, true, true, 1, 8},
    DecodeTile{128, 128, 1, kAll, 2, 1, 2, 2, true, false, 1, 0},
    DecodeTile{128, 128, 2, kAllAndFloat8, 2, 1, 2, 2, true, true, 1, 3},
    DecodeTile{192, 128, 1, kAll, 2, 1, 2, 2, true, false, 1, 0},
    DecodeTile{192, 128, 2, kAll, 2, 1, 1, 2, true, true, 1, 0},
    DecodeTile{192, 192, 1, kAll, 2, 1, 1, 2, false, false, 1, 0},
    DecodeTile{192, 192, 2, kAll, 3, 2, 1, 1, false, false, 1, 0},
    DecodeTile{256, 256, 1, kAll, 2, 2, 2, 1, false, false, 1, 0},
};

using DecodeVariant = VariantRow;
// Features are branches of a whole CTA: reading keys and values takes longer.
inline constexpr DecodeVariant kDecodeVariants[] = {
    DecodeVariant{kPlain, kAny, "", {.scores = true, .sink = true, .positions = true}},
    DecodeVariant{kFloat8, kAllAndFloat8, ".e4m3", {.scores = true, .sink = true, .positions = true, .float8 = true}},
};
// clang-format on

/// The row of the table; one that is not there does not compile.
constexpr DecodeTile decode_tile(int head_dim, int head_dim_v, int consumers) {
  return find_tile(kDecodeTiles, head_dim, head_dim_v, consumers);
}

}  // namespace flashmask::sm90
