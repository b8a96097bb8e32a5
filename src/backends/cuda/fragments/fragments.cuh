// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/ptx/registers.cuh"

namespace flashmask::cuda {

/// A thread's share of a kRows x kColumns matrix of fp32 accumulators, whose warps hold 16 rows each, as every
/// tensor-core instruction leaves them: with (g, c) = (lane / 4, lane % 4), element 4j + 2h + e is row g + 8h, column
/// 8j + 2c + e.
template <int kRows, int kColumns, int kThreads = 2 * kRows>
using Accumulators = float[kRows * kColumns / kThreads];

/// Such a matrix in 16 bits, as the A operand of a product over its columns, 16 of them at a time.
template <int kColumns>
using PackedFragments = uint32_t[kColumns / 16][4];

/// kCount of a thread's accumulators from kFirst on.
template <int kFirst, int kCount, typename T, int kAll>
__device__ __forceinline__ auto part_of(T (&all)[kAll]) -> T (&)[kCount] {
  static_assert(kFirst + kCount <= kAll);
  return reinterpret_cast<T(&)[kCount]>(all[kFirst]);
}

/// A warp's 16 rows of such a matrix.
struct Slab {
  static constexpr int kRows = 16;
  __device__ __forceinline__ static int row_in_eight() { return static_cast<int>(ptx::lane()) / 4; }
  __device__ __forceinline__ static int column_pair() { return static_cast<int>(threadIdx.x % 4); }
  /// Row and column of a thread's i-th accumulator.
  __device__ __forceinline__ static int row(int i) { return row_in_eight() + i / 2 % 2 * 8; }
  __device__ __forceinline__ static int column(int i) { return i / 4 * 8 + 2 * column_pair() + i % 2; }
};

/// Steps from a thread's first score to its i-th, in a slab of rows x keys, and in one of keys x rows.
struct SlabSteps {
  __host__ __device__ static constexpr int row(int i) { return i / 2 % 2 * 8; }
  __host__ __device__ static constexpr int key(int i) { return i / 4 * 8 + i % 2; }
};
struct KeySlabSteps {
  __host__ __device__ static constexpr int row(int i) { return SlabSteps::key(i); }
  __host__ __device__ static constexpr int key(int i) { return SlabSteps::row(i); }
};

/// The maximum and the sum over the four lanes that share a row.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffff, x, 1);
  return x + __shfl_xor_sync(0xffffffff, x, 2);
}

/// Transposes four words of each lane of a quad: word i of lane c becomes word c of lane i. `lane` is the caller's.
__device__ __forceinline__ void transpose_in_quad(uint32_t lane, uint32_t (&words)[4]) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = lane & bit;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const uint32_t other = __shfl_xor_sync(0xffffffff, upper ? words[i] : words[i + bit], bit);
      words[i] = upper ? other : words[i];
      words[i + bit] = upper ? words[i + bit] : other;
    }
  }
}

}  // namespace flashmask::cuda
