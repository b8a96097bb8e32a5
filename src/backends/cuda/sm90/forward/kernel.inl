// SPDX-License-Identifier: Apache-2.0
// The forward kernel as the entry FLASHMASK_ENTRY, of traits FLASHMASK_TRAITS; instance.cu.in includes this once for
// each. Its body stands in the entry itself and not in a function that entries call: that inlines to other machine
// code.
//
// Warpgroup 0: warp 0 is the producer, warps 1 to kConsumers are the mask warps; warpgroups 1 to kConsumers consume.
// The contract between them, by barrier: mbarriers of SharedStorage, but the last two are named barriers.
//
// clang-format off
//   barrier       arrivals in a phase                  waiting           what its phase says
//   q_full        producer 1, and the bytes of Q       consumers, masks  work tile announced; Q there if it has tiles
//   q_empty       each consumer warp and mask warp 1   producer          announcement and Q may be overwritten: the
//                                                                        output has left through Q's buffer, or, where
//                                                                        it does not, the last S has been computed
//   k_full        producer 1, and the bytes of K       consumers, masks  tile announced, K there
//   k_empty       each consumer warp 1, or all its     producer          announcement and K may be overwritten
//                 lanes (kAllLanesRead); mask warps 1
//   v_full        producer 1, and the bytes of V       consumers         V there
//   v_empty       each consumer warp 1                 producer          V may be overwritten
//   padded_full   producer 1, and the bytes of V       producer          V there, whose padding it zeroes before v_full
//   mask_full     mask warp, all 32 lanes              its warpgroup     a part of a partial granule's bits there
//   mask_empty    all lanes that read the part         mask warp         the part may be overwritten
//   kWarpgroup..  a warpgroup's 128 threads            these threads     its products no longer read Q, through
//                                                                        which the output leaves
//   kTurn..       128 threads of the warpgroup before  the next 128      its turn to issue products, where kTurns
// clang-format on
//
// Phases: `full` barriers are waited for with RingPosition::phase(), `empty` ones with its complement, as all buffers
// begin empty. Each role sees every phase of a barrier that it waits for, also of tiles that it skips. mask_full and
// mask_empty count partial granules, by the number in a tile's code. A work tile of kEnd ends all roles.

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
