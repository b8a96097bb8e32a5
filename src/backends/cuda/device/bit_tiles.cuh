// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/device/mask_params.h"

namespace flashmask::cuda {

/// Which rows of a granule see each of its keys.
struct BitTile {
  const uint2* rows_of_keys;  ///< null: all keys have the same rows
  uint32_t all;               ///< then these, 32 of the granule's

  /// Rows 0 to 31 and 32 to 63 that see key number `key`, 0 <= key < 128. In the last key block keys past the last may
  /// seem visible.
  __device__ __forceinline__ uint2 rows(int32_t key) const {
    return rows_of_keys ? __ldg(rows_of_keys + key) : make_uint2(all, all);
  }
};

/// The tile of a row granule and key block of the mask at `offset`, as MaskColumns::place has it; also of granules
/// that have none in memory, being full or empty, or past the last.
__device__ __forceinline__ BitTile find_tile(const BitTiles& tiles, int64_t offset, int32_t granule,
                                             int32_t key_block) {
  if (granule >= tiles.row_granules) return {nullptr, 0};
  const int64_t word = offset + static_cast<int64_t>(granule) * tiles.words_per_row + key_block / 32;
  const uint32_t live = __ldg(tiles.row_live + word), full = __ldg(tiles.row_full + word), bit = 1u << key_block % 32;
  const int32_t before = __ldg(tiles.before + word);
  if (!(live & ~full & bit)) return {nullptr, full & bit ? ~0u : 0};
  return {tiles.rows_of_keys + static_cast<int64_t>(before + __popc(live & ~full & (bit - 1))) * BitTiles::kKeys, 0};
}

/// The tile that lane number `lane` has.
__device__ __forceinline__ BitTile read_lane_tile(const BitTile& own, int32_t lane) {
  const auto address = reinterpret_cast<unsigned long long>(own.rows_of_keys);
  return {reinterpret_cast<const uint2*>(__shfl_sync(0xffffffff, address, lane)),
          __shfl_sync(0xffffffff, own.all, lane)};
}

}  // namespace flashmask::cuda
