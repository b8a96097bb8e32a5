// SPDX-License-Identifier: Apache-2.0
// The backward kernel as the entry FLASHMASK_ENTRY, of traits FLASHMASK_TRAITS; instance.cu.in includes this once for
// each. Its body stands in the entry itself and not in a function that entries call: that inlines to other machine
// code.
//
// Warpgroup 0: warp 0 is the producer, warp 1 the mask warp, warps 2 and 3 the store warps, one for each stage; the
// other two warpgroups consume. The contract between them, by barrier: mbarriers of SharedStorage, one for each stage
// except k_full, kv_empty, padded_full, dq_empty and ds_empty, but the last two are named barriers. Where dP comes in
// halves dO has one stage.
//
// clang-format off
//   barrier      arrivals in a phase                        waiting              what its phase says
//   tile_full    producer 1                                 mask, store warps    tile announced
//   q_full       producer 1, and bytes of Q and biases      consumers            tile announced, Q and biases there
//   q_empty      each consumer warp 1, or all 32 lanes      producer             announcement, Q and biases may be
//                (release_rows); the mask warp and the                           overwritten
//                stage's store warp 1
//   dout_full    producer 1, and the bytes of dO; with      consumers            dO there, and V of a new work tile
//                a work tile's first tile V's, too
//   dout_empty   each consumer warp 1                       producer             dO may be overwritten
//   scores_full  all 256 consumer threads                   producer, mask warp  dS written; announcement and mask bits
//                                                                                read by all lanes
//   mask_full    mask warp, all 32 lanes                    consumers            bits of a partial tile there
//   dq_full      each consumer warp 1; where kAlternate     stage's store warp   the tile's dq is in the staging tiles
//                the 128 threads of the warpgroup with dQ
//   dq_empty     the store warp that stores dq 1            consumers            staging tiles may be overwritten
//   ds_empty     each consumer warp 1, if dS has one stage  consumers            dS may be overwritten: dQ done
//   k_full       producer 1, and the bytes of K             consumers            K of a new work tile there
//   kv_empty     each consumer warp 1                       producer             K and V may be overwritten
//   padded_full  producer 1, and the bytes of tiles with    producer             tiles there, whose padding it zeroes
//                padding                                                         before q_full, dout_full or k_full
//   kScores..    128 threads of the other warpgroup         a warpgroup's 128    dS of both warpgroups there
//   kStaging..   as kScores.., if kAlternate, not kSplit    a warpgroup's 128    the other one's last dq is stored
// clang-format on
//
// Phases: barriers of stages are waited for with RingPosition::phase(), `empty` ones and scores_full with its
// complement. But mask_full counts a stage's partial tiles, dq_full its tiles that are not alone, dq_empty such tiles
// in all stages, ds_empty all tiles, k_full and kv_empty the work tiles that have tiles; each role keeps their parities
// itself (the consumers in phases_). A tile of kNothing takes part in all barriers of its stage but masks', dS's and
// dq's. kEnd is announced once for each stage, as each has a store warp of its own; the consumers act on the first, and
// if dO has one stage they release it, for which the second waits.
//
// A wide kernel has no dq_full, dq_empty, ds_empty and kStaging. Its warps 2 and 3 are store warps, one for each
// consumer; where dq leaves from registers there are none. Its contract differs in this:
//
// clang-format off
//   barrier      arrivals in a phase                     waiting              what its phase says
//   q_empty      consumers as above; the mask warp, and  producer             as above
//                both store warps 1
//   scores_full  all 256 consumer threads                producer, mask warp  P and dS written; as above
//   dq.full      each warp of a consumer 1               its store warp       a block of dq is in its staging tile
//   dq.empty     the consumer's store warp 1             the consumer         its staging tile may be overwritten
// clang-format on
//
// dq.full and dq.empty count blocks of dq. Store warps belong to no stage, so kEnd is announced once.
//
// A kernel that runs in pairs of CTAs is a wide one whose dq leaves from registers. Its contract differs in this:
//
// clang-format off
//   barrier      arrivals in a phase                     waiting              what its phase says
//   ds_full      a consumer thread 1, and the bytes of   consumers            the other CTA's dS there
//                the other CTA's dS
//   ds_empty     each consumer warp of the other CTA 1   consumers            dS sent and read, its places may be
//                                                                             overwritten in both CTAs
//   claim_full   the second CTA's producer 1, and the    second's producer    claim there
//                bytes of claim
//   claim_empty  the second CTA's producer 1             first's producer     claim may be overwritten
//   kv_empty     each consumer warp 1                    producer             K and V may be overwritten: dk and dv
//                                                                             have left through them
//   kExchange..  128 threads of the other warpgroup      a warpgroup's 128    both have waited for ds_empty
// clang-format on
//
// There, a tile of kNothing takes part in ds_full and ds_empty, and its work tile in kv_empty. A CTA releases the other
// one's dS only after that one's threads have all waited for ds_empty: a phase too early would look like one too late.
//
// A kernel whose CTAs share rows has claim_full and claim_empty, too, and at the end of each work tile:
//
// clang-format off
//   barrier      arrivals in a phase                     waiting              what its phase says
//   kStaging..   128 threads of the other warpgroup      a warpgroup's 128    the other one no longer reads dS or the
//                                                                             staging tiles
//   part_empty   a thread of the other CTA 1             the consumer that    the other CTA's dS and staging tiles may
//                                                        sends its part       be overwritten
//   part_full    a thread 1, and the bytes of a part     the consumer that    the other CTA's part is there
//                                                        adds it
//   kExchange..  128 threads of the other warpgroup      a warpgroup's 128    that part is read
// clang-format on

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
  if constexpr (kInCluster<Traits>) {
    ptx::cluster_sync();
  } else {
    __syncthreads();
  }
  cudaGridDependencySynchronize();
  const uint32_t warp = ptx::uniform(threadIdx.x / 32);
  if (warp < 4) {
    ptx::decrease_registers<Traits::kHelperRegisters>();
    if (warp == 0) {
      Producer<Traits>(p, shared).run();
    } else if (warp == 1) {
      MaskBuilder<Traits>(p, shared).run();
    } else {
      Roles<Traits>::DqAccumulator(p, shared, warp - 2).run();
    }
  } else {
    ptx::increase_registers<Traits::kConsumerRegisters>();
    if constexpr (Traits::kOneCode) {
      Roles<Traits>::Consumer(p, shared, warp / 4 - 1).run();
    } else if (warp < 8) {
      Roles<Traits>::Consumer(p, shared, 0).run();
    } else {
      Roles<Traits>::Consumer(p, shared, 1).run();
    }
  }
  // The other CTA of the cluster still arrives at this one's barriers.
  if constexpr (kInCluster<Traits>) ptx::cluster_sync();
}

#undef FLASHMASK_ENTRY
#undef FLASHMASK_TRAITS
