// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/sm90/forward/consumer.cuh"
#include "backends/cuda/sm90/forward/mask_builder.cuh"
#include "backends/cuda/sm90/forward/producer.cuh"

namespace flashmask::sm90 {

template <typename Traits>
__device__ __forceinline__ void init_barriers(SharedStorage<Traits>& shared) {
  for (int i = 0; i < 2; ++i) {
    ptx::barrier_init(shared.q_full[i], 1);
    ptx::barrier_init(shared.q_empty[i], Traits::kConsumerWarps + Traits::kConsumers);
  }
  for (int i = 0; i < Traits::kStages; ++i) {
    ptx::barrier_init(shared.k_full[i], 1);
    ptx::barrier_init(shared.v_full[i], 1);
    ptx::barrier_init(shared.k_empty[i], Traits::kConsumerWarps + Traits::kConsumers);
    ptx::barrier_init(shared.v_empty[i], Traits::kConsumerWarps);
  }
  for (int n = 0; n < Traits::kConsumers * Traits::kMaskSlots * Traits::kMaskParts; ++n) {
    // Every lane that wrote or read bits arrives.
    ptx::barrier_init((&shared.mask_full[0][0][0])[n], 32);
    ptx::barrier_init((&shared.mask_empty[0][0][0])[n], 128 / Traits::kMaskParts);
  }
  ptx::fence_barrier_init();
}

/// FlashMask forward (algorithm 1 of the paper). Of warpgroup 0, one warp loads and one warp for each consumer warpgroup
/// builds element masks; the other warpgroups consume.
template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) forward_kernel(const __grid_constant__ ForwardParams p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<SharedStorage<Traits>*>(memory);
  if (threadIdx.x == 0) {
    ptx::prefetch(p.q);
    ptx::prefetch(p.k);
    ptx::prefetch(p.v);
    ptx::prefetch(p.out);
    init_barriers(shared);
  }
  __syncthreads();
  // Up to here under the end of the stream's previous kernel, as the next one may start under this one's.
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  const uint32_t warp = ptx::uniform(threadIdx.x / 32);
  if (warp < 4) {
    ptx::decrease_registers<Traits::kProducerRegisters>();
    if (warp == 0) {
      Producer<Traits>(p, shared).run();
    } else if (warp <= Traits::kConsumers) {
      MaskBuilder<Traits>(p, shared).run();
    }
  } else {
    ptx::increase_registers<Traits::kConsumerRegisters>();
    Consumer<Traits>(p, shared).run();
  }
}

}  // namespace flashmask::sm90
