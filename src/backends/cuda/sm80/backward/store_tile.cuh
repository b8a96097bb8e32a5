// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/fragments/store_rows.cuh"
#include "backends/cuda/sm80/common/operands.cuh"
#include "backends/cuda/sm80/common/shared_tile.cuh"

namespace flashmask::sm80::bwd {

/// Writes a matrix of gradients, times `factor`, to a tile in shared memory. Neighbouring slabs and pieces of a warp's
/// fragments are as far apart as the grid has warps.
template <typename Grid, typename Tile>
__device__ __forceinline__ void write_fragments(const typename Grid::Fragments& gradients, float factor,
                                                unsigned char* tile, int warp) {
  const Grid grid(warp);
  const PieceWriter<Tile> writer(tile + 16 * grid.row * Tile::kRowBytes, grid.column);
#pragma unroll
  for (int slab = 0; slab < Grid::kSlabs; ++slab) {
#pragma unroll
    for (int piece = 0; piece < Grid::kPieces; ++piece)
      writer.write(16 * Grid::kRowWarps * slab, piece * Grid::kColumnWarps, gradients[slab] + 8 * piece, factor);
  }
}

/// Stores a tile's rows before `rows` and columns before `columns` to a tensor, at whose first one of these rows `to`
/// is. All kThreads threads of the CTA store 16 bytes at a time.
template <typename Tile, int kThreads>
__device__ __forceinline__ void store_tile(const unsigned char* tile, typename Tile::Element* to, int64_t row_stride,
                                           int32_t rows, int32_t columns) {
  constexpr int kChunks = Tile::kColumns / Tile::kChunkElements;
#pragma unroll 1
  for (int n = static_cast<int>(threadIdx.x); n < Tile::kRows * kChunks; n += kThreads) {
    const int row = n / kChunks, chunk = n % kChunks;
    if (row >= rows || chunk * Tile::kChunkElements >= columns) continue;
    const uint32_t from = chunk / Tile::kChunksOfRow * Tile::kBlockBytes + Tile::place(row, chunk % Tile::kChunksOfRow);
    *reinterpret_cast<uint4*>(to + row * row_stride + chunk * Tile::kChunkElements) =
        *reinterpret_cast<const uint4*>(tile + from);
  }
}

/// Stores a matrix of gradients, times `factor`, in fp32, from a warp's fragments: rows before `rows` and columns
/// before `columns` to a tensor, at whose first one of these rows `to` is. Zeros become positive, as in
/// write_fragments.
template <typename Grid>
__device__ __forceinline__ void store_fragments(const typename Grid::Fragments& gradients, float factor, float* to,
                                                int64_t row_stride, int32_t rows, int32_t columns, int warp) {
  const Grid grid(warp);
#pragma unroll
  for (int slab = 0; slab < Grid::kSlabs; ++slab) {
#pragma unroll
    for (int piece = 0; piece < Grid::kPieces; ++piece) {
      float values[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i] = __fmaf_rn(gradients[slab][8 * piece + i], factor, 0.f);
      const int column = 16 * (grid.column + piece * Grid::kColumnWarps);
      cuda::store_float_slab(values, to + column, row_stride, 16 * (grid.row + Grid::kRowWarps * slab), rows,
                             columns - column);
    }
  }
}

}  // namespace flashmask::sm80::bwd
