// SPDX-License-Identifier: Apache-2.0
// The forward kernel as the entry FLASHMASK_ENTRY, of traits FLASHMASK_TRAITS; instance.cu.in includes this once for
// each. Its body stands in the entry itself and not in a function that entries call: that inlines to other machine
// code.
//
// Warpgroup 0: warp 0 is the producer, warps 1 to kConsumers are the mask warps; warpgroups 1 to kConsumers consume.
// The contract between them, by barrier (all are mbarriers of SharedStorage but the last two):
//
//   barrier       arrivals in a phase                              who waits           what it means
//   q_full[2]     producer 1 (+ bytes of Q)                        consumers, masks    work tile announced; Q there, if
//   it
//                                                                                      has tiles
//   q_empty[2]    each consumer warp 1 (its output has left Q's    producer            slot's announcement and Q may be
//                 buffer), each mask warp 1                                            overwritten
//   k_full[S]     producer 1 (+ bytes of K)                        consumers, masks    tile announced, K there
//   k_empty[S]    each consumer warp 1, each mask warp 1           producer            announcement and K may be
//   overwritten v_full[S]     producer 1 (+ bytes of V)                        consumers           V there v_empty[S]
//   each consumer warp 1                             producer            V may be overwritten mask_full     mask warp,
//   all 32 lanes                          its warpgroup       bits of a partial granule's part there mask_empty    the
//   lanes that share the part                    mask warp           bits may be overwritten kWarpgroup-   a
//   warpgroup's 128 threads                        the same            its products no longer read Q, which
//     Barrier                                                                          the output leaves through
//   kTurnBarrier  the warpgroup before, 128 threads                a warpgroup's 128   its turn to issue products (only
//   where
//                                                                                      kOverlapFrom > 0)
//
// Phases: `full` barriers are waited for with RingPosition::phase(), `empty` ones with its complement, as all buffers
// begin empty. Each role sees every phase of a barrier that it waits for, work tiles and tiles that it skips included.
// mask_full and mask_empty count partial granules, by the number that a tile's code carries. A work tile of kEnd ends
// all roles.

extern "C" __global__ void __launch_bounds__(FLASHMASK_TRAITS::kThreads, 1)
    FLASHMASK_ENTRY(const __grid_constant__ FLASHMASK_TRAITS::Params p) {
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
