// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/device/mask_params.h"
#include "backends/cuda/ptx/barrier.cuh"
#include "backends/cuda/ptx/swizzle.cuh"
#include "backends/cuda/ptx/tma.cuh"

namespace flashmask::sm90 {

/// The start of padding: a tensor's rows from `end` on count as zeros. A tensor without any needs no care, as the
/// copy engine fills in zeros behind its last row.
struct PaddingStart {
  int32_t end = INT32_MAX;

  __device__ __forceinline__ static PaddingStart after(int32_t visible, int32_t length) {
    return {visible < length ? visible : INT32_MAX};
  }
  /// The first row of padding, counted from the tile's first row, `row`; at least the tile's rows if it has none.
  __device__ __forceinline__ int32_t in_tile(int32_t row) const { return end - row; }
};

/// Zeroes a tile that the copy engine has written, of kBlocks blocks of 64 columns and kRows rows, from row `first` on.
/// A whole warp calls it, and arrives at a barrier for the tensor cores.
template <int kRows, int kBlocks, typename Element>
__device__ __forceinline__ void clear_padding(Element* tile, int32_t first) {
  constexpr int kChunks = ptx::Swizzle128::kRow / sizeof(uint4);
  auto* const chunks = reinterpret_cast<uint4*>(tile);
  const int32_t begin = kChunks * max(first, 0) + static_cast<int32_t>(ptx::lane());
#pragma unroll 1
  for (int block = 0; block < kBlocks; ++block) {
#pragma unroll 1
    for (int32_t chunk = begin; chunk < kChunks * kRows; chunk += 32) chunks[block * kChunks * kRows + chunk] = {};
  }
  ptx::fence_async_proxy();
}

}  // namespace flashmask::sm90
