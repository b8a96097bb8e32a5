// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

#include "backends/cuda/host/head_dims.h"
#include "backends/cuda/sm90/common/columns.h"

namespace flashmask::sm90 {

using cuda::kHeadDimStep, cuda::least_tile, cuda::padding_share, cuda::head_dims_refusal;

// A call runs in the smallest tile that holds its head dims. The rest of the tile is padding, which is neither loaded
// nor stored: TMA reads zeros past the end of a tensor, and writes nothing there.

/// Layout of a row's columns in shared memory, in blocks of 64: each block begins with `width` columns and goes on with
/// zeros; `count` blocks have columns, 0 if the rows cannot be divided like this.
struct ColumnBlocks {
  int64_t width = 0, count = 0;
};

/// The columns of rows of `dim` in buffers of `dim_of_tile`, a multiple of 64, that TMA fills in one copy: in equal
/// parts, as TMA has one width for all blocks of a copy. All tensors with a product's inner dimension are divided
/// alike, so their columns meet; and an output leaves as it came in.
constexpr ColumnBlocks equal_blocks(int64_t dim, int64_t dim_of_tile) {
  for (int64_t count = (dim + 63) / 64; dim > 0 && count <= dim_of_tile / 64; ++count) {
    if (dim % (kHeadDimStep * count) == 0) return {dim / count, count};
  }
  return {};
}

/// The columns of rows of `dim` in buffers that TMA fills in a copy per block: all begin in the tensor's only block.
constexpr ColumnBlocks blocks_to_the_end(int64_t dim) { return {dim, 1}; }

/// The columns of rows of `dim` in the buffers of `tile`, of kForwardTiles or kBackwardTiles, that take rows of
/// `dim_of_tile`.
template <typename Tile>
constexpr ColumnBlocks dim_blocks(const Tile& tile, int64_t dim, int64_t dim_of_tile) {
  return tile.one_copy ? equal_blocks(dim, dim_of_tile) : blocks_to_the_end(dim);
}

/// Places of the columns of rows of `dim` in the buffers of `tile` that take rows of `dim_of_tile`.
template <typename Tile>
constexpr Columns columns_of(const Tile& tile, int64_t dim, int64_t dim_of_tile) {
  const ColumnBlocks blocks = dim_blocks(tile, dim, dim_of_tile);
  return {static_cast<int32_t>(dim), static_cast<int32_t>(std::min<int64_t>(blocks.width, 64))};
}

/// True if the kernels of `tile` take rows of `dim` in buffers for rows of `dim_of_tile`.
template <typename Tile>
constexpr bool holds(const Tile& tile, int64_t dim, int64_t dim_of_tile) {
  const bool fits = dim % kHeadDimStep == 0 && dim <= dim_of_tile;
  return fits && dim_blocks(tile, dim, dim_of_tile).count > 0;
}

}  // namespace flashmask::sm90
