// SPDX-License-Identifier: Apache-2.0
// The backward kernel as the entry FLASHMASK_ENTRY, of traits FLASHMASK_TRAITS; instance.cu.in includes this once for
// each. Its body stands in the entry itself and not in a function that entries call: that inlines to other machine
// code.
//
// Warpgroup 0: warp 0 is the producer, warp 1 the mask warp, warps 2 and 3 the store warps, one for each stage; the
// other two warpgroups consume. The contract between them, by barrier (all are mbarriers of SharedStorage but the last
// two; [S]: one for each stage):
//
//   barrier          arrivals in a phase                           who waits            what it means
//   tile_full[S]     producer 1                                    mask, store          tile announced
//   q_full[S]        producer 1 (+ bytes of Q, biases)             consumers            tile announced; Q, biases there
//   q_empty[S]       each consumer warp 1, mask warp 1, the        producer             announcement, Q and biases may
//   be
//                    stage's store warp 1                                               overwritten
//   scores_full[S]   consumers, all 256 threads                    producer, mask       dS written, announcement and
//   mask
//                                                                                       bits read by all lanes
//   dout_full[S]     producer 1 (+ bytes of dO; with the first     consumers            dO there, V of a new work tile,
//   too
//                    tile of a work tile, of V)
//   dout_empty[S]    each consumer warp 1                          producer             dO may be overwritten
//   mask_full[S]     mask warp, all 32 lanes                       consumers            bits of a partial tile there
//   k_full           producer 1 (+ bytes of K)                     consumers            K of a new work tile there
//   kv_empty         each consumer warp 1                          producer             K and V may be overwritten
//   dq_full[S]       where kAlternate, one warpgroup's 128         the stage's store    the tile's dq lies in the
//   staging
//                    threads, else each consumer warp 1            warp                 tiles
//   dq_empty         the store warp that had it 1                  consumers            staging tiles may be
//   overwritten kScoresBarrier   a warpgroup waits, the other arrives          a warpgroup's 128    dS of both
//   warpgroups is there kStagingBarrier  the same, only where kAlternate               a warpgroup's 128    the other
//   warpgroup has stored dq
//
// Phases: barriers of stages are waited for by RingPosition: `full` ones with phase(), `empty` ones and scores_full
// with its complement. mask_full counts the partial tiles of a stage, k_full the work tiles with tiles, dq_full the
// stage's tiles that are not alone, and dq_empty those of all stages: each role keeps their parities itself
// (Consumer::phases_). A tile of kNothing or kEnd takes part in all barriers of its stage but those of masks and dq;
// every store warp gets its own kEnd.

extern "C" __global__ void __launch_bounds__(FLASHMASK_TRAITS::kThreads, 1)
    FLASHMASK_ENTRY(const __grid_constant__ FLASHMASK_TRAITS::Params p) {
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
      DqAccumulator<Traits>(p, shared, warp - 2).run();
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
