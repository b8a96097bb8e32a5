// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/sm80/tile_config.h"

namespace flashmask::sm80 {

/// A tile of the kernels over caches: up to 64 packed rows of a request, and keys that come 64 at a time. CMake reads
/// this table's rows and the variants' as it reads those of kForwardTiles.
struct DecodeTile {
  int head_dim, head_dim_v;
  int kilobytes;  ///< as ForwardTile's
  TileFeatures features;
  int slots;         ///< a power of two: the ring's that keys and values go through
  int float8_slots;  ///< likewise, of keys and values of half the size

  static constexpr int kProductsOfQk = 1, kProductsOfV = 1;
  static constexpr int kMostCtas = 2;  ///< a multiprocessor has, for which the registers of a thread are limited
};

// clang-format off: the build reads a row from each line
inline constexpr DecodeTile kDecodeTiles[] = {
    // d, d_v, KB, features  slots, of e4m3
    DecodeTile{64, 64, 99, kAll, 8, 8},
    DecodeTile{128, 128, 99, kAll, 4, 4},
    DecodeTile{192, 128, 99, kAll, 2, 4},
    DecodeTile{192, 192, 99, kAll, 2, 4},
    DecodeTile{256, 256, 99, kAll, 2, 2},
    DecodeTile{256, 256, 163, kAll, 4, 4},
};

using DecodeVariant = VariantRow;
// Features are branches of a whole CTA: reading keys and values takes longer.
inline constexpr DecodeVariant kDecodeVariants[] = {
    DecodeVariant{kPlain, kAny, "", {.scores = true, .sink = true, .positions = true}},
    DecodeVariant{kPlain, kAny, ".e4m3", {.scores = true, .sink = true, .positions = true, .float8 = true}},
};
// clang-format on

}  // namespace flashmask::sm80
