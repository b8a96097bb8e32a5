// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/fragments/float8.cuh"
#include "backends/cuda/sm80/common/operands.cuh"

namespace flashmask::sm80 {

// Operands of a warp's products as a cache stores keys and values. `tile` is the address of the warp's first row.

/// B of S = Q K^T: 16 keys by kSteps times 16 columns.
template <typename Tile, bool kFloat8>
struct KeyOperand {
  static constexpr int kSteps = 1;
  RowsOfB<Tile> rows;
  __device__ __forceinline__ explicit KeyOperand(uint32_t tile) : rows(tile) {}
  __device__ __forceinline__ void read(int key, int step, uint32_t (&b)[kSteps][4]) const {
    rows.read(key, step, b[0]);
  }
};
/// A lane gets four neighbouring columns of e4m3 where a product asks for two pairs eight apart: the columns of each 16
/// are multiplied in another order, in which Q lies, too (see place_in_sixteen).
template <typename Tile>
struct KeyOperand<Tile, true> {
  static constexpr int kSteps = 2;
  RowsOfB<Tile> rows;
  __device__ __forceinline__ explicit KeyOperand(uint32_t tile) : rows(tile) {}
  __device__ __forceinline__ void read(int key, int step, uint32_t (&b)[kSteps][4]) const {
    uint32_t bytes[4];
    rows.read(key, step, bytes);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const cuda::HalfPairs pairs = cuda::e4m3_neighbours(bytes[n]);
      b[n % 2][n / 2 * 2] = pairs.first;
      b[n % 2][n / 2 * 2 + 1] = pairs.second;
    }
  }
};
/// The place of a pair of columns among each 16, both counted in pairs, that e4m3's columns are multiplied in.
__device__ __forceinline__ uint32_t place_in_sixteen(uint32_t pair) { return pair % 2 * 4 + pair / 2; }

/// B of O += P V: 16 keys by kPieces times 16 columns.
template <typename Tile, bool kFloat8>
struct ValueOperand {
  static constexpr int kPieces = 1;
  ColumnsOfB<Tile> rows;
  __device__ __forceinline__ explicit ValueOperand(uint32_t tile) : rows(tile) {}
  __device__ __forceinline__ void read(int key, int piece, uint32_t (&b)[kPieces][4]) const {
    rows.read(key, piece, b[0]);
  }
};
/// A lane gets two neighbouring columns of e4m3 of a key: even ones of each 16 are the first eight of a product, odd
/// ones the others (see cuda::InterleavedColumns).
template <typename Tile>
struct ValueOperand<Tile, true> {
  static constexpr int kPieces = 2;
  ColumnsOfB<Tile> rows;
  __device__ __forceinline__ explicit ValueOperand(uint32_t tile) : rows(tile) {}
  __device__ __forceinline__ void read(int key, int piece, uint32_t (&b)[kPieces][4]) const {
    uint32_t bytes[4];
    rows.read(key, piece, bytes);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const cuda::HalfPairs pairs = cuda::e4m3_every_other(bytes[n]);
      b[n / 2][n % 2] = pairs.first;
      b[n / 2][2 + n % 2] = pairs.second;
    }
  }
};

}  // namespace flashmask::sm80
