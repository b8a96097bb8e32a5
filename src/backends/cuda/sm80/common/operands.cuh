// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/ptx/ldmatrix.cuh"
#include "backends/cuda/ptx/mma.cuh"
#include "backends/cuda/ptx/registers.cuh"

namespace flashmask::sm80 {

/// Where a lane reads 16 x 16 pieces of a tile in shared memory: piece (row, step) begins at that row, a multiple of 8,
/// and column 16 * step.
template <typename Tile>
class PieceReader {
 public:
  /// Of `tile`, an address; the lane reads row `row` and chunk `chunk` (0 or 1) of each piece.
  __device__ __forceinline__ PieceReader(uint32_t tile, uint32_t row, uint32_t chunk)
      : row_(tile + row * Tile::kRowBytes), chunk_((chunk ^ Tile::permutation(row)) << 4) {}

  __device__ __forceinline__ uint32_t at(int row, int step) const {
    const uint32_t block = step / Tile::kStepsOfBlock * Tile::kBlockBytes + row * Tile::kRowBytes;
    return row_ + block + (chunk_ ^ static_cast<uint32_t>(step % Tile::kStepsOfBlock) << 5);
  }

 private:
  uint32_t row_, chunk_;
};

// Readers are made where they are used, as a lane's number read anew takes no register until then.
//
// The four 8 x 8 matrices of a piece come in one of two orders: down the rows first, or along a row first.

template <typename Tile>
__device__ __forceinline__ PieceReader<Tile> rows_first(uint32_t tile) {
  const uint32_t lane = ptx::lane_anew();
  return {tile, lane % 16, lane / 16};
}
template <typename Tile>
__device__ __forceinline__ PieceReader<Tile> columns_first(uint32_t tile) {
  const uint32_t lane = ptx::lane_anew();
  return {tile, lane / 16 * 8 + lane % 8, lane / 8 % 2};
}

// Operands of products with an inner dimension of 16, see ptx::mma. A of 16 rows; B of 16 columns, two products'.

/// A[m, k] = tile[row + m, 16 * step + k].
template <typename Tile>
struct RowsOfA {
  PieceReader<Tile> reader;
  __device__ __forceinline__ explicit RowsOfA(uint32_t tile) : reader(rows_first<Tile>(tile)) {}
  __device__ __forceinline__ void read(int row, int step, uint32_t (&a)[4]) const {
    ptx::ldmatrix_x4(reader.at(row, step), a);
  }
};
/// A[m, k] = tile[row + k, 16 * step + m].
template <typename Tile>
struct ColumnsOfA {
  PieceReader<Tile> reader;
  __device__ __forceinline__ explicit ColumnsOfA(uint32_t tile) : reader(columns_first<Tile>(tile)) {}
  __device__ __forceinline__ void read(int row, int step, uint32_t (&a)[4]) const {
    ptx::ldmatrix_x4_transposed(reader.at(row, step), a);
  }
};
/// B[k, n] = tile[row + n, 16 * step + k].
template <typename Tile>
struct RowsOfB {
  PieceReader<Tile> reader;
  __device__ __forceinline__ explicit RowsOfB(uint32_t tile) : reader(columns_first<Tile>(tile)) {}
  __device__ __forceinline__ void read(int row, int step, uint32_t (&b)[4]) const {
    ptx::ldmatrix_x4(reader.at(row, step), b);
  }
};
/// B[k, n] = tile[row + k, 16 * step + n].
template <typename Tile>
struct ColumnsOfB {
  PieceReader<Tile> reader;
  __device__ __forceinline__ explicit ColumnsOfB(uint32_t tile) : reader(rows_first<Tile>(tile)) {}
  __device__ __forceinline__ void read(int row, int step, uint32_t (&b)[4]) const {
    ptx::ldmatrix_x4_transposed(reader.at(row, step), b);
  }
};

/// D += A * B for 16 rows and 16 columns: those of a thread's accumulators that begin at 16 * `piece`.
template <typename Element, int kValues>
__device__ __forceinline__ void multiply(float (&d)[kValues], int piece, const uint32_t (&a)[4],
                                         const uint32_t (&b)[4]) {
  ptx::mma<Element>(reinterpret_cast<float(&)[4]>(d[8 * piece]), a, b[0], b[1]);
  ptx::mma<Element>(reinterpret_cast<float(&)[4]>(d[8 * piece + 4]), a, b[2], b[3]);
}

}  // namespace flashmask::sm80
