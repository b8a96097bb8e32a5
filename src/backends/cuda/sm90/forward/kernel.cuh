// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/sm90/forward/consumer.cuh"
#include "backends/cuda/sm90/forward/producer.cuh"

namespace flashmask::sm90 {

template <typename Traits>
__device__ __forceinline__ void init_barriers(SharedStorage<Traits>& shared) {
  for (int i = 0; i < 2; ++i) {
    ptx::barrier_init(shared.q_full[i], 1);
    ptx::barrier_init(shared.q_empty[i], Traits::kConsumerWarps);
  }
  for (int i = 0; i < Traits::kStages; ++i) {
    ptx::barrier_init(shared.k_full[i], 1);
    ptx::barrier_init(shared.v_full[i], 1);
    ptx::barrier_init(shared.k_empty[i], Traits::kConsumerWarps);
    ptx::barrier_init(shared.v_empty[i], Traits::kConsumerWarps);
  }
  ptx::fence_barrier_init();
}

/// FlashMask forward (algorithm 1 of the paper): warpgroup 0 produces, the others consume.
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
  if (threadIdx.x < 128) {
    ptx::decrease_registers<Traits::kProducerRegisters>();
    if (threadIdx.x < 32) Producer<Traits>(p, shared).run();
  } else {
    ptx::increase_registers<Traits::kConsumerRegisters>();
    Consumer<Traits>(p, shared).run();
  }
}

}  // namespace flashmask::sm90
