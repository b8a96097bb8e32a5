// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "flashmask/export.h"
#include "flashmask/mask.h"

namespace flashmask {

/// A granule, the unit of a plan: 64 query rows x 128 keys.
inline constexpr int64_t kGranuleRows = 64;
inline constexpr int64_t kGranuleKeys = 128;

/// Query rows and keys of a tile.
struct TileShape {
  int64_t rows = 128;
  int64_t keys = 128;
  bool operator==(const TileShape&) const = default;
};

/// Class of a tile: no element visible, some, or all.
enum class TileClass : uint8_t { kEmpty = 0, kPartial = 1, kFull = 2 };

/// The classes of one mask batch entry and head, row-major: [ceil(seqlen_q / rows), ceil(seqlen_k / keys)].
struct TileGrid {
  TileShape shape;
  int64_t row_tiles = 0, key_tiles = 0;
  std::vector<TileClass> classes;
  TileClass at(int64_t row_tile, int64_t key_tile) const {
    return classes[static_cast<std::size_t>(row_tile * key_tiles + key_tile)];
  }
};

/// Computes the exact class of every tile, in time linear in the lengths and the number of tiles. Under a block mask
/// tiles are composed of parts of gcd(side, 128), so a side should share a large factor with 128.
///
/// A band over positions is judged by the least and the greatest position of the rows and of the keys of parts of
/// gcd(rows, 64) x gcd(keys, 128), which are the plan's if the sides are multiples of these: then a tile is classified
/// as it is executed. A tile without a visible element, or without a hidden one, may be kPartial then.
FLASHMASK_API TileGrid classify_tiles(const Mask& mask, int64_t batch, int64_t head, TileShape shape = {});

}  // namespace flashmask
