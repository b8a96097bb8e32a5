// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/ptx/cp_async.cuh"
#include "backends/cuda/ptx/registers.cuh"

namespace flashmask::sm80 {

/// How kRows rows of kColumns 16-bit elements lie in shared memory: block after block of 64 columns, or of 32 where
/// they are no multiple of 64; in a block row after row, in a row chunks of 16 bytes. Chunks are permuted by rows, so
/// that the same chunk of eight neighbouring rows, which an instruction reads at a time, lies in all banks.
template <typename Element_, int kRows_, int kColumns_>
struct SharedTile {
  using Element = Element_;
  static_assert(sizeof(Element) == 2);
  static constexpr int kRows = kRows_, kColumns = kColumns_;
  static constexpr int kBlockColumns = kColumns % 64 == 0 ? 64 : 32;
  static_assert(kRows % 16 == 0 && kColumns % kBlockColumns == 0);
  static constexpr int kChunkElements = 8, kChunksOfRow = kBlockColumns / kChunkElements;  ///< per row of a block
  static constexpr uint32_t kRowBytes = kBlockColumns * sizeof(Element), kBlockBytes = kRows * kRowBytes;
  static constexpr uint32_t kBytes = kBlockBytes * (kColumns / kBlockColumns);

  /// Permutes a row's chunks by exclusive or; rows a multiple of 8 apart share the permutation.
  __host__ __device__ static constexpr uint32_t permutation(uint32_t row) {
    return kChunksOfRow == 8 ? row % 8 : row / 2 % 4;
  }
  /// The offset of chunk `chunk` of a row of a block, from the block's first byte.
  __host__ __device__ static constexpr uint32_t place(uint32_t row, uint32_t chunk) {
    return row * kRowBytes + ((chunk ^ permutation(row)) << 4);
  }

  /// Steps of 16 columns in a block.
  static constexpr int kStepsOfBlock = kBlockColumns / 16;
};

/// Fills a tile with rows of a tensor: all kThreads threads of the CTA copy, each the same chunk of some rows. Rows
/// past `rows` and columns past `columns` become zeros. The copies join the threads' next group.
template <typename Tile, int kThreads>
class TileLoader {
 public:
  using Element = typename Tile::Element;
  __device__ __forceinline__ TileLoader() : TileLoader(static_cast<int32_t>(ptx::opaque(threadIdx.x))) {}

  /// `from` is the tile's first row, `tile` the tile's address; rows may be none or negative.
  __device__ __forceinline__ void load(uint32_t tile, const Element* from, int64_t row_stride, int32_t rows,
                                       int32_t columns) const {
    uint32_t to = tile + Tile::place(row_, column_ / Tile::kChunkElements);
    const Element* chunk = from + row_ * row_stride + column_;
#pragma unroll
    for (int pass = 0; pass < Tile::kRows / kRowsOfPass; ++pass) {
      const bool inside = row_ + pass * kRowsOfPass < rows;
#pragma unroll
      for (int column = 0; column < Tile::kColumns; column += Tile::kBlockColumns) {
        ptx::cp_async_16(to + column / Tile::kBlockColumns * Tile::kBlockBytes, chunk + column,
                         inside && column + column_ < columns);
      }
      to += kRowsOfPass * Tile::kRowBytes;
      chunk += kRowsOfPass * row_stride;
    }
  }

 private:
  /// Takes an opaque number, so that nothing derived from it is kept in registers until the next load.
  __device__ __forceinline__ explicit TileLoader(int32_t thread)
      : row_(thread / Tile::kChunksOfRow), column_(thread % Tile::kChunksOfRow * Tile::kChunkElements) {}

  static constexpr int kRowsOfPass = kThreads / Tile::kChunksOfRow;
  static_assert(kRowsOfPass % 8 == 0 && Tile::kRows % kRowsOfPass == 0, "a pass leaves the permutation as it is");
  int32_t row_, column_;
};

}  // namespace flashmask::sm80
