// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/sm90/backward/consumer.cuh"
#include "backends/cuda/sm90/backward/mask_builder.cuh"
#include "backends/cuda/sm90/backward/producer.cuh"
#include "backends/cuda/sm90/backward/row_gradient.cuh"

namespace flashmask::sm90::grad {

template <typename Traits>
__device__ __forceinline__ void init_barriers(SharedStorage<Traits>& shared) {
  for (int i = 0; i < Traits::kStages; ++i) {
    ptx::barrier_init(shared.tile_full[i], 1);
    ptx::barrier_init(shared.mask_full[i], 32);
    ptx::barrier_init(shared.scores_full[i], 128 * Traits::kConsumers);
    ptx::barrier_init(shared.q_full[i], 1);
    ptx::barrier_init(shared.q_empty[i], Traits::kConsumerWarps + 2);  // and the mask warp and the stage's store warp
    ptx::barrier_init(shared.dout_full[i], 1);
    ptx::barrier_init(shared.dout_empty[i], Traits::kConsumerWarps);
    ptx::barrier_init(shared.dq_full[i], Traits::kAlternate ? 128 : Traits::kConsumerWarps);
  }
  ptx::barrier_init(shared.dq_empty, 1);
  ptx::barrier_init(shared.k_full, 1);
  ptx::barrier_init(shared.kv_empty, Traits::kConsumerWarps);
  ptx::fence_barrier_init();
}

/// FlashMask backward (algorithm 2 of the paper). Of warpgroup 0, one warp loads, one builds element masks and two add up dq; the
/// other warpgroups consume.
template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) backward_kernel(const __grid_constant__ BackwardParams p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<SharedStorage<Traits>*>(memory);
  if (threadIdx.x == 0) {
    ptx::prefetch(p.q);
    ptx::prefetch(p.k);
    ptx::prefetch(p.v);
    ptx::prefetch(p.dout);
    init_barriers(shared);
  }
  __syncthreads();
  cudaGridDependencySynchronize();
  const uint32_t warp = ptx::uniform(threadIdx.x / 32);
  if (warp < 4) {
    ptx::decrease_registers<Traits::kHelperRegisters>();
    if (warp == 0) {
      Producer<Traits>(p, shared).run();
    } else if (warp == 1) {
      MaskBuilder<Traits>(p, shared).run();
    } else {
      RowGradientAdder<Traits>(p, shared, warp - 2).run();
    }
  } else {
    ptx::increase_registers<Traits::kConsumerRegisters>();
    if constexpr (Traits::kOneCode) {
      Consumer<Traits>(p, shared, warp / 4 - 1).run();
    } else if (warp < 8) {
      Consumer<Traits>(p, shared, 0).run();
    } else {
      Consumer<Traits>(p, shared, 1).run();
    }
  }
}

}  // namespace flashmask::sm90::grad
