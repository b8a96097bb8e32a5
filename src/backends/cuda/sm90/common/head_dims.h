// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "backends/cuda/sm90/common/columns.h"
#include "backends/launch.h"
#include "backends/problem.h"
#include "common/message.h"

namespace flashmask::sm90 {

// A call runs in the least of the tiles that hold its head dims. What a tile has more is padding, and neither moved nor
// stored: TMA reads zeros past the end of a tensor, and writes nothing there.

/// Head dims are multiples of this: TMA's strides are multiples of 16 bytes.
inline constexpr int64_t kHeadDimStep = 8;

/// How the columns of a row lie in shared memory, in blocks of 64: each block begins with `width` of them and goes on
/// with zeros; `count` blocks have columns. No block does: the rows cannot be divided so.
struct ColumnBlocks {
  int64_t width = 0, count = 0;
};

/// The columns of rows of `dim` in buffers of `dim_of_tile`, a multiple of 64, that TMA fills in one copy: in equal
/// parts, as it has one width for all blocks of a copy. It is the same for all tensors of a product's inner dimension,
/// so their columns meet; and an output leaves as it came in.
constexpr ColumnBlocks equal_blocks(int64_t dim, int64_t dim_of_tile) {
  for (int64_t count = (dim + 63) / 64; dim > 0 && count <= dim_of_tile / 64; ++count) {
    if (dim % (kHeadDimStep * count) == 0) return {dim / count, count};
  }
  return {};
}

/// The same where TMA fills the blocks in a copy each: those begin in the one block that a tensor has then.
constexpr ColumnBlocks blocks_to_the_end(int64_t dim) { return {dim, 1}; }

/// The columns of rows of `dim` in the buffers of `tile`, of kForwardTiles or kBackwardTiles, that take rows of
/// `dim_of_tile`.
template <typename Tile>
constexpr ColumnBlocks blocks_of_rows(const Tile& tile, int64_t dim, int64_t dim_of_tile) {
  return tile.one_copy ? equal_blocks(dim, dim_of_tile) : blocks_to_the_end(dim);
}

/// Where the columns of rows of `dim` lie in the buffers of `tile` that take rows of `dim_of_tile`.
template <typename Tile>
constexpr Columns columns_of(const Tile& tile, int64_t dim, int64_t dim_of_tile) {
  const ColumnBlocks blocks = blocks_of_rows(tile, dim, dim_of_tile);
  return {static_cast<int32_t>(dim), static_cast<int32_t>(std::min<int64_t>(blocks.width, 64))};
}

/// Whether the kernels of `tile` take rows of `dim` where it has `dim_of_tile`.
template <typename Tile>
constexpr bool holds(const Tile& tile, int64_t dim, int64_t dim_of_tile) {
  const bool fits = dim % kHeadDimStep == 0 && dim <= dim_of_tile;
  return fits && blocks_of_rows(tile, dim, dim_of_tile).count > 0;
}

/// What the products of a pair of a row and a key take, in multiply-adds.
template <typename Tile>
constexpr int64_t work_of_pair(int64_t head_dim, int64_t head_dim_v) {
  return Tile::kProductsOfQk * head_dim + Tile::kProductsOfV * head_dim_v;
}

/// The first tile of `tiles` of those with the least work that hold the head dims; null if none does.
template <typename Tile, std::size_t kCount>
constexpr const Tile* least_tile(const Tile (&tiles)[kCount], int64_t head_dim, int64_t head_dim_v) {
  const auto work = [](const Tile& tile) { return work_of_pair<Tile>(tile.head_dim, tile.head_dim_v); };
  const Tile* least = nullptr;
  for (const Tile& tile : tiles) {
    if (!holds(tile, head_dim, tile.head_dim) || !holds(tile, head_dim_v, tile.head_dim_v)) continue;
    if (!least || work(tile) < work(*least)) least = &tile;
  }
  return least;
}

/// Explanation::padding_share of a call that runs in `tile`.
template <typename Tile>
constexpr double padding_share(const Tile& tile, int64_t head_dim, int64_t head_dim_v) {
  return 1 - static_cast<double>(work_of_pair<Tile>(head_dim, head_dim_v)) /
                 static_cast<double>(work_of_pair<Tile>(tile.head_dim, tile.head_dim_v));
}

/// Why a call is not taken whose head dims none of `tiles` holds, with the nearest that one does.
template <typename Tile, std::size_t kCount>
Refusal head_dims_refusal(const Problem& p, const Tile (&tiles)[kCount]) {
  std::string known;
  const Tile* nearest = nullptr;
  const auto missing = [&](const Tile& tile) {
    return std::max(p.head_dim - tile.head_dim, int64_t{0}) + std::max(p.head_dim_v - tile.head_dim_v, int64_t{0});
  };
  for (const Tile& tile : tiles) {
    const std::string dims = message(tile.head_dim, " / ", tile.head_dim_v);
    if (known.find(dims) == std::string::npos) known += (known.empty() ? "" : ", ") + dims;
    if (!nearest || missing(tile) < missing(*nearest)) nearest = &tile;
  }
  return {message("head_dim ", p.head_dim, " with head_dim_v ", p.head_dim_v, " is not taken by the ",
                  p.is_backward ? "backward" : "forward", "; it takes multiples of ", kHeadDimStep,
                  " that one of (head_dim / head_dim_v) ", known, " holds; the nearest is ", nearest->head_dim, " / ",
                  nearest->head_dim_v)};
}

}  // namespace flashmask::sm90
