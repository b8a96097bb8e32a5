// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "call/problem.h"

namespace flashmask::cuda {

/// A backward's tiles, of a head and of all heads; key_blocks: the plan's, of a head. Key tiles are those of full key
/// blocks, though the last block may have fewer.
struct BackwardTiles {
  int64_t rows, key_blocks, keys, all_rows, all_keys;

  /// `tile_rows`, `tile_keys`: of a tile; tile_keys divides a key block's.
  BackwardTiles(const Problem& p, int tile_rows, int tile_keys);
};

/// Why the kernels cannot count the call's tiles of these sizes in 32 bits; empty if they can.
std::string tiles_refusal(const Problem& p, int tile_rows, int tile_keys);

}  // namespace flashmask::cuda
