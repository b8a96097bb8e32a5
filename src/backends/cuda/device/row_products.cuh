// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <cstdint>

#include "backends/cuda/device/row_threads.h"

namespace flashmask::cuda {

/// A tile's rows as the block's threads share them: 16 bytes each. The last threads of a row may have none.
template <int kRows, int kDim>
struct RowShare {
  static constexpr int kThreadsPerRow = std::bit_ceil(kDim / 8u), kRowsPerPass = kRowThreads / kThreadsPerRow;
  static constexpr int kPasses = kRows / kRowsPerPass;
  __device__ static int row(int pass) { return pass * kRowsPerPass + static_cast<int>(threadIdx.x) / kThreadsPerRow; }
  __device__ static int column() { return static_cast<int>(threadIdx.x) % kThreadsPerRow * 8; }
};

/// Eight neighbours of a row.
template <typename T>
struct Eight {
  uint4 words[sizeof(T) / 2];

  __device__ __forceinline__ static Eight load(const T* from) { return *reinterpret_cast<const Eight*>(from); }
  __device__ __forceinline__ void store(T* to) const { *reinterpret_cast<Eight*>(to) = *this; }
  __device__ __forceinline__ const T* values() const { return reinterpret_cast<const T*>(words); }
};

template <typename A, typename B>
__device__ __forceinline__ float dot(const Eight<A>& a, const Eight<B>& b) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum += static_cast<float>(a.values()[i]) * static_cast<float>(b.values()[i]);
  return sum;
}

}  // namespace flashmask::cuda
