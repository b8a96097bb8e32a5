// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/ptx/ldmatrix.cuh"
#include "backends/cuda/ptx/mma.cuh"
#include "backends/cuda/ptx/registers.cuh"

namespace flashmask::sm80 {

/// Addresses from which a lane reads 16 x 16 pieces of a tile in shared memory: piece (row, step) begins at that row, a
/// multiple of 8, and column 16 * (first step + step). The first step is less than some power of two, at most a block's
/// steps, and every step is a multiple of this power.
template <typename Tile>
class PieceReader {
 public:
  /// `tile` is the tile's address; the lane reads row `row` and chunk `chunk` (0 or 1) of each piece.
  __device__ __forceinline__ PieceReader(uint32_t tile, uint32_t row, uint32_t chunk, uint32_t first_step)
      : row_(tile + row * Tile::kRowBytes), chunk_((chunk ^ 2 * first_step ^ Tile::permutation(row)) << 4) {}

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
__device__ __forceinline__ PieceReader<Tile> rows_first(uint32_t tile, uint32_t first_step, uint32_t lane) {
  return {tile, lane % 16, lane / 16, first_step};
}
template <typename Tile>
__device__ __forceinline__ PieceReader<Tile> columns_first(uint32_t tile, uint32_t first_step, uint32_t lane) {
  return {tile, lane / 16 * 8 + lane % 8, lane / 8 % 2, first_step};
}

// Operands of products with an inner dimension of 16, see ptx::mma. A of 16 rows; B of 16 columns, two products'.

/// A[m, k] = tile[row + m, 16 * step + k].
template <typename Tile>
struct RowsOfA {
  PieceReader<Tile> reader;
  __device__ __forceinline__ explicit RowsOfA(uint32_t tile, uint32_t first_step = 0,
                                              uint32_t lane = ptx::reload_lane())
      : reader(rows_first<Tile>(tile, first_step, lane)) {}
  __device__ __forceinline__ void read(int row, int step, uint32_t (&a)[4]) const {
    ptx::ldmatrix_x4(reader.at(row, step), a);
  }
};
/// A[m, k] = tile[row + k, 16 * step + m].
template <typename Tile>
struct ColumnsOfA {
  PieceReader<Tile> reader;
  __device__ __forceinline__ explicit ColumnsOfA(uint32_t tile, uint32_t first_step = 0,
                                                 uint32_t lane = ptx::reload_lane())
      : reader(columns_first<Tile>(tile, first_step, lane)) {}
  __device__ __forceinline__ void read(int row, int step, uint32_t (&a)[4]) const {
    ptx::ldmatrix_x4_transposed(reader.at(row, step), a);
  }
};
/// B[k, n] = tile[row + n, 16 * step + k].
template <typename Tile>
struct RowsOfB {
  PieceReader<Tile> reader;
  __device__ __forceinline__ explicit RowsOfB(uint32_t tile, uint32_t first_step = 0,
                                              uint32_t lane = ptx::reload_lane())
      : reader(columns_first<Tile>(tile, first_step, lane)) {}
  __device__ __forceinline__ void read(int row, int step, uint32_t (&b)[4]) const {
    ptx::ldmatrix_x4(reader.at(row, step), b);
  }
};
/// B[k, n] = tile[row + k, 16 * step + n].
template <typename Tile>
struct ColumnsOfB {
  PieceReader<Tile> reader;
  __device__ __forceinline__ explicit ColumnsOfB(uint32_t tile, uint32_t first_step = 0,
                                                 uint32_t lane = ptx::reload_lane())
      : reader(rows_first<Tile>(tile, first_step, lane)) {}
  __device__ __forceinline__ void read(int row, int step, uint32_t (&b)[4]) const {
    ptx::ldmatrix_x4_transposed(reader.at(row, step), b);
  }
};

/// Writes a lane's fragments of 16 x 16 pieces of a tile, with steps as above.
template <typename Tile>
class PieceWriter {
 public:
  using Element = typename Tile::Element;
  __device__ __forceinline__ explicit PieceWriter(unsigned char* tile, uint32_t first_step = 0)
      : PieceWriter(tile, first_step, ptx::reload_lane()) {}

  /// Writes eight values of a thread's accumulators, times `factor`. Zeros become positive.
  __device__ __forceinline__ void write(int row, int step, const float* values, float factor) const {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      words[i] = ptx::pack<Element>(__fmaf_rn(values[2 * i], factor, 0.f), __fmaf_rn(values[2 * i + 1], factor, 0.f));
    write(row, step, words);
  }
  /// Writes packed values: word 2j + h is row g + 8h, columns 8j + 2c and the next.
  __device__ __forceinline__ void write(int row, int step, const uint32_t (&words)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t chunk = chunk_ ^ static_cast<uint32_t>(step % Tile::kStepsOfBlock * 2 + i / 2) << 4;
      const uint32_t block = step / Tile::kStepsOfBlock * Tile::kBlockBytes + (row + i % 2 * 8) * Tile::kRowBytes;
      *reinterpret_cast<uint32_t*>(row_ + block + chunk) = words[i];
    }
  }

 private:
  __device__ __forceinline__ PieceWriter(unsigned char* tile, uint32_t first_step, uint32_t lane)
      : row_(tile + lane / 4 * Tile::kRowBytes + lane % 4 * 4),
        chunk_((2 * first_step ^ Tile::permutation(lane / 4)) << 4) {}

  unsigned char* row_;
  uint32_t chunk_;
};

/// D += A * B for 16 rows and 16 columns: the thread's accumulators from column 16 * `piece` on.
template <typename Element, int kValues>
__device__ __forceinline__ void multiply(float (&d)[kValues], int piece, const uint32_t (&a)[4],
                                         const uint32_t (&b)[4]) {
  ptx::mma<Element>(reinterpret_cast<float (&)[4]>(d[8 * piece]), a, b[0], b[1]);
  ptx::mma<Element>(reinterpret_cast<float (&)[4]>(d[8 * piece + 4]), a, b[2], b[3]);
}

/// D += A * B for the warp's kSlabs times 16 rows and its columns, over kSteps steps of 16: read_a(slab, step, a) and
/// read_b(piece, step, b) read the operands.
template <typename Element, int kSteps, int kSlabs, int kValues, typename ReadA, typename ReadB>
__device__ __forceinline__ void multiply_steps(float (&d)[kSlabs][kValues], const ReadA& read_a, const ReadB& read_b) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    uint32_t a[kSlabs][4];
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) read_a(slab, step, a[slab]);
#pragma unroll
    for (int piece = 0; piece < kValues / 8; ++piece) {
      uint32_t b[4];
      read_b(piece, step, b);
#pragma unroll
      for (int slab = 0; slab < kSlabs; ++slab) multiply<Element>(d[slab], piece, a[slab], b);
    }
  }
}

}  // namespace flashmask::sm80
