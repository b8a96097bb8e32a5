// SPDX-License-Identifier: Apache-2.0
// The forward kernel as the entry FLASHMASK_ENTRY, of traits FLASHMASK_TRAITS; instance.cu.in includes this once for
// each. Its body stands in the entry itself and not in a function that entries call: that inlines to other machine
// code.

/// FlashMask forward (algorithm 1 of the paper). Of warpgroup 0, one warp loads and one warp for each consumer
/// warpgroup builds element masks; the other warpgroups consume.
extern "C" __global__ void __launch_bounds__(FLASHMASK_TRAITS::kThreads, 1)
    FLASHMASK_ENTRY(const __grid_constant__ ForwardParams p) {
  using Traits = FLASHMASK_TRAITS;
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

#undef FLASHMASK_ENTRY
#undef FLASHMASK_TRAITS
