// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/attention/l2_group.h"
#include "backends/cuda/attention/mask_params.h"

namespace flashmask::cuda {

/// The first query granule that sees a key tile of the plan's first mask; -1 if none does.
__device__ inline int32_t first_live_granule(const KeyPlanBits& plan, uint32_t key_tile) {
  const uint32_t* live = plan.key_live + static_cast<int64_t>(key_tile) * plan.words_per_key;
  for (int32_t word = 0; word < plan.words_per_key; ++word) {
    if (const uint32_t bits = __ldg(live + word)) return word * 32 + __ffs(static_cast<int>(bits)) - 1;
  }
  return -1;
}

/// How long a head's key tiles wait for each other, by the plan's first mask.
struct TurnCounts {
  int32_t live;      ///< granules
  int32_t together;  ///< key tiles that begin with the same granule as the one before them in the order of turns
  int32_t in_a_row;  ///< key tiles that the same granule sees, at most

  /// Adds the calling thread's share; all threads of the block call it, on cleared shared memory.
  __device__ void count(const L2GroupSize& l2_group, const KeyPlanBits& plan, uint32_t key_tiles) {
    for (uint32_t tile = threadIdx.x; tile < key_tiles; tile += blockDim.x) {
      atomicAdd(&live, __ldg(l2_group.key_counts + tile));
      const int32_t first = first_live_granule(plan, tile);
      if (first >= 0 && tile + 1 < key_tiles && first == first_live_granule(plan, tile + 1)) atomicAdd(&together, 1);
    }
    for (int32_t granule = static_cast<int32_t>(threadIdx.x); granule < plan.row_granules;
         granule += static_cast<int32_t>(blockDim.x))
      atomicMax(&in_a_row, __ldg(l2_group.row_counts + granule));
  }
};

/// How many heads fill the time that the chain of turns takes: then the chain and the work of an L2 group take equally
/// long.
__device__ inline uint32_t heads_in_group(const L2GroupSize& l2_group, const TurnCounts& counts) {
  constexpr float kMostlyLive = 0.4f;
  const auto live = static_cast<float>(counts.live);
  if (live > kMostlyLive * l2_group.granules) return l2_group.dense;
  const auto chain = static_cast<float>(max(counts.together, counts.in_a_row));
  const float enough = l2_group.tiles_per_turn * l2_group.granules_per_tile * chain / live;
  return max(l2_group.dense, static_cast<uint32_t>(fminf(enough, static_cast<float>(l2_group.most))));
}

/// All threads of a block call it. Kernel: any type of the calling kernel's own, which so has its own shared memory.
template <typename Kernel>
__device__ inline void choose_l2_group(const L2GroupSize& l2_group, const KeyPlanBits& plan, uint32_t key_tiles) {
  __shared__ TurnCounts counts;
  if (threadIdx.x == 0) counts = {};
  __syncthreads();
  counts.count(l2_group, plan, key_tiles);
  __syncthreads();
  if (threadIdx.x == 0) *l2_group.result = heads_in_group(l2_group, counts);
}

}  // namespace flashmask::cuda
