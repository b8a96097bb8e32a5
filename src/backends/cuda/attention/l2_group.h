// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace flashmask::cuda {

/// What the device chooses the size of an L2 group from, in deterministic mode. Key tiles that begin with the same
/// rows, or that many rows see, take turns, which takes longer than their work where columns are short; neighbours of
/// other heads then fill the time. More heads than that cost L2 cache. Only the device knows which tiles of a mask are
/// live.
struct L2GroupSize {
  const int32_t* key_counts;  ///< live granules of each key tile of the plan's first mask
  const int32_t* row_counts;  ///< live key tiles of each of its query granules
  float granules;             ///< of a mask, live or not
  float granules_per_tile;    ///< of a query tile
  float tiles_per_turn;       ///< tiles that the device gets done while one is handed from a key tile to the next
  uint32_t dense, most;       ///< for masks that are mostly live, and at least; at most for others
  uint32_t* result;           ///< null: none is chosen
};

}  // namespace flashmask::cuda
