// SPDX-License-Identifier: Apache-2.0
// The backward kernel as the entry FLASHMASK_ENTRY, of traits FLASHMASK_TRAITS; instance.cu.in includes this once for
// each. Its body stands in the entry itself and not in a function that entries call: that inlines to other machine
// code.

/// FlashMask backward (algorithm 2 of the paper). Of warpgroup 0, one warp loads, one builds element masks and two add
/// up dq; the other warpgroups consume.
extern "C" __global__ void __launch_bounds__(FLASHMASK_TRAITS::kThreads, 1)
    FLASHMASK_ENTRY(const __grid_constant__ BackwardParams p) {
  using Traits = FLASHMASK_TRAITS;
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

#undef FLASHMASK_ENTRY
#undef FLASHMASK_TRAITS
