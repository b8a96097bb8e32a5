// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/sm80/tile_config.h"

namespace flashmask::sm80 {

/// A tile of the kernels over caches: up to 64 packed rows of a request. Keys come in steps of about 16 KB, as each
/// step takes a warp a while, whatever it holds. CMake reads this table's rows and the variants' as it reads those of
/// kForwardTiles.
struct DecodeTile {
  int head_dim, head_dim_v;
  int kilobytes;  ///< as ForwardTile's
  TileFeatures features;
  /// Keys, or values, that come at a time, and how often they fit in the ring that they go through: a power of two.
  int keys, slots;
  int float8_keys, float8_slots;  ///< likewise, of e4m3

  static constexpr int kProductsOfQk = 1, kProductsOfV = 1;
  static constexpr int kMostCtas = 2;  ///< a multiprocessor has, for which the registers of a thread are limited
};

// clang-format off: the build reads a row from each line
inline constexpr DecodeTile kDecodeTiles[] = {
    // d, d_v, KB, features  keys slots, of e4m3
    DecodeTile{64, 64, 99, kAll, 128, 4, 128, 8},
    DecodeTile{128, 128, 99, kAll, 64, 4, 128, 4},
    DecodeTile{192, 128, 99, kAll, 64, 2, 64, 4},
    DecodeTile{192, 192, 99, kAll, 64, 2, 64, 4},
    DecodeTile{256, 256, 99, kAll, 64, 2, 64, 2},
    DecodeTile{256, 256, 163, kAll, 64, 4, 64, 4},
};

using DecodeVariant = VariantRow;
// Features are branches of a whole CTA: reading keys and values takes longer.
inline constexpr DecodeVariant kDecodeVariants[] = {
    DecodeVariant{kPlain, kAny, "", {.scores = true, .sink = true, .positions = true}},
    DecodeVariant{kFloat8, kAny, ".e4m3", {.scores = true, .sink = true, .positions = true, .float8 = true}},
};
// clang-format on

}  // namespace flashmask::sm80
