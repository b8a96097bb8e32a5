// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/device/feature_params.h"
#include "backends/cuda/ptx/registers.cuh"
#include "mask/rules.h"

namespace flashmask::cuda {

/// True for parameters of kernels that have bands over positions.
template <typename Params>
inline constexpr bool kHasPositions = requires(const Params& p) { p.features.positions; };

/// Rows row0 .. row0 + 31 of a batch entry, one for each lane: which positions they see. Rows may be past the last.
__device__ __forceinline__ rules::SeenPositions seen_by_lane(const PositionParams& p, uint32_t batch, int32_t row0,
                                                             int32_t seqlen_q) {
  const int32_t row = min(row0 + static_cast<int32_t>(ptx::reload_lane()), seqlen_q - 1);
  return rules::seen_positions(p.first, p.first.q_pos[batch * p.q_stride + row]);
}

/// The positions of a lane's keys, first_key + at[i].
template <int n>
__device__ __forceinline__ void read_positions(const PositionParams& p, uint32_t batch, int32_t first_key,
                                               const int32_t (&at)[n], int32_t (&position)[n]) {
  const int32_t* of_keys = p.first.k_pos + batch * p.k_stride + first_key;
#pragma unroll
  for (int i = 0; i < n; ++i) position[i] = of_keys[at[i]];
}

/// Clears bit r of bits[i] where lane r's row does not see the calling lane's key at position[i].
template <int n>
__device__ __forceinline__ void hide_by_positions(rules::SeenPositions own_row, const int32_t (&position)[n],
                                                  uint32_t (&bits)[n]) {
#pragma unroll 1  // a mask warp has few registers
  for (int r = 0; r < 32; ++r) {
    const int32_t first = __shfl_sync(0xffffffff, own_row.first, r), last = __shfl_sync(0xffffffff, own_row.last, r);
#pragma unroll
    for (int i = 0; i < n; ++i) {
      if (position[i] < first || position[i] > last) bits[i] &= ~(1u << r);
    }
  }
}

}  // namespace flashmask::cuda
