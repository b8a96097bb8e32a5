// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/fragments/fragments.cuh"
#include "backends/cuda/ptx/registers.cuh"

namespace flashmask::cuda {

/// Stores a warp's slab of kColumns columns in the tensors' type: `origin` is the tensor's row 0, `row` the slab's
/// first row. Skips rows past `rows` and columns past `columns`. A quad holds 16 bytes of a row at a time. Its
/// lanes exchange four such chunks, so that each of them has one, and the quad stores 64 bytes of a row, whole sectors.
template <typename Element, int kValues>
__device__ __forceinline__ void store_slab(const float (&o)[kValues], Element* origin, int64_t row_stride, int32_t row,
                                           int32_t rows, int32_t columns) {
  constexpr int kChunk = 8, kOfQuad = 4 * kChunk, kColumns = 2 * kValues;
  static_assert(kColumns % kOfQuad == 0);
  const uint32_t lane = ptx::lane();
  const int32_t first_column = kChunk * static_cast<int32_t>(lane % 4);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t own = row + static_cast<int32_t>(lane / 4) + 8 * half;
    const int32_t own_columns = own < rows ? columns - first_column : 0;
    Element* const to = origin + own * row_stride + first_column;
#pragma unroll
    for (int column = 0; column < kColumns; column += kOfQuad) {
      uint32_t words[4];
#pragma unroll
      for (int chunk = 0; chunk < 4; ++chunk) {
        const float* pair = o + (column + kChunk * chunk) / 2 + 2 * half;
        words[chunk] = ptx::pack<Element>(pair[0], pair[1]);
      }
      transpose_in_quad(lane, words);
      if (column < own_columns) *reinterpret_cast<uint4*>(to + column) = {words[0], words[1], words[2], words[3]};
    }
  }
}

/// Stores a warp's slab in fp32. A quad stores 32 bytes of a row at a time, a whole sector.
template <int kValues>
__device__ __forceinline__ void store_float_slab(const float (&o)[kValues], float* origin, int64_t row_stride,
                                                 int32_t row, int32_t rows, int32_t columns) {
  const auto lane = static_cast<int32_t>(ptx::lane());
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t own = row + lane / 4 + 8 * half;
    const int32_t own_columns = own < rows ? columns : 0;
    float* const to = origin + own * row_stride + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < kValues / 4; ++j) {
      const float* pair = o + 4 * j + 2 * half;
      if (8 * j < own_columns) *reinterpret_cast<float2*>(to + 8 * j) = {pair[0], pair[1]};
    }
  }
}

}  // namespace flashmask::cuda
