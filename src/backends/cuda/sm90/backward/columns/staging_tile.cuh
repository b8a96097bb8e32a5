// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/device/delay.cuh"
#include "backends/cuda/ptx/registers.cuh"
#include "backends/cuda/ptx/tensor_core.cuh"
#include "backends/cuda/ptx/tma.cuh"

namespace flashmask::sm90::bwd {

/// A staging tile of 16 rows in shared memory, on their way out of a warp.
template <typename Element>
class SlabTile {
 public:
  /// Puts 16 rows of 8 * kFragments values in a staging tile as the warp's lanes hold them.
  template <int kFragments>
  __device__ __forceinline__ static void write_fragments(const float* values, float* tile) {
    auto* to = reinterpret_cast<float4*>(tile) + ptx::lane();
#pragma unroll
    for (int e = 0; e < kFragments; ++e)
      to[e * 32] = {values[4 * e], values[4 * e + 1], values[4 * e + 2], values[4 * e + 3]};
    ptx::fence_async_proxy();
  }

  /// Puts 16 rows of gradients in a staging tile as TMA stores them. Zeros become positive, as in sums of several
  /// tiles.
  template <int kValues>
  __device__ __forceinline__ static void write_rows(const float (&gradients)[kValues], float factor, float* tile,
                                                    uint32_t lane = ptx::lane()) {
    const uint32_t row = lane % 16, to = ptx::shared_address(tile) + row * Swizzle::kRow;
#pragma unroll
    for (int step = 0; step < kValues / 8; ++step) {
      const uint32_t chunk = step % 4 * 2 + lane / 16;
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = gradients + 8 * step + 2 * i;
        words[i] = ptx::pack<Element>(__fmaf_rn(pair[0], factor, 0.f), __fmaf_rn(pair[1], factor, 0.f));
      }
      ptx::stmatrix_x4(to + step / 4 * Swizzle::block(16) + Swizzle::chunk(row, chunk), words[0], words[1], words[2],
                       words[3]);
    }
    ptx::fence_async_proxy();
    __syncwarp();
  }

  /// Stores a staging tile of kColumns columns if it begins before `end`: as one box, or each block of 64 columns as
  /// one.
  template <bool kOneCopy, int kColumns>
  __device__ __forceinline__ static void store(const CUtensorMap& map, const ptx::BoxOrigin& at, int32_t end,
                                               const float* tile) {
    delay<Role::kStore>();
    if (!ptx::is_leader()) return;
    if constexpr (kOneCopy) {
      if (at.row < end) ptx::tma_store(map, tile, at);
    } else {
#pragma unroll
      for (int box = 0; box < (kColumns + 63) / 64; ++box) {
        if (at.row >= end) break;
        ptx::Blocks<false>::store(map, tile + box * (16 * 64 / 2), {at.row, at.block + box, at.head, at.batch});
      }
    }
    ptx::bulk_commit();
  }

 private:
  using Swizzle = ptx::Swizzle128;
};

}  // namespace flashmask::sm90::bwd
