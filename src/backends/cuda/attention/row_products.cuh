// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <cstdint>

#include "backends/cuda/attention/row_threads.h"

namespace flashmask::cuda {

/// A tile's rows as the block's threads share them: 16 bytes each. The last threads of a row may have none.
template <int kRows, int kDim>
struct RowShare {
  static constexpr int kThreadsPerRow = std::bit_ceil(kDim / 8u), kRowsPerPass = kRowThreads / kThreadsPerRow;
  static constexpr int kPasses = kRows / kRowsPerPass;
  __device__ static int row(int pass) { return pass * kRowsPerPass + static_cast<int>(threadIdx.x) / kThreadsPerRow; }
  __device__ static int column() { return static_cast<int>(threadIdx.x) % kThreadsPerRow * 8; }
};

template <typename Element>
__device__ __forceinline__ float dot(const uint4& a, const uint4& b) {
  const auto* x = reinterpret_cast<const Element*>(&a);
  const auto* y = reinterpret_cast<const Element*>(&b);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum += static_cast<float>(x[i]) * static_cast<float>(y[i]);
  return sum;
}

}  // namespace flashmask::cuda
