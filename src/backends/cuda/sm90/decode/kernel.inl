// SPDX-License-Identifier: Apache-2.0
// The decode kernel as the entry FLASHMASK_ENTRY, of traits FLASHMASK_TRAITS; instance.cu.in includes this once for
// each.
//
// The first warpgroup, in tall tiles the first two, are consumers. Of the last one's warps the first is the producer of
// keys, then come that of values, the mask warp and the query warp. The contract between them:
//
// clang-format off
//   barrier      arrivals in a phase                waiting                  what its phase says
//   work_full    key producer 1                     all but the producers    a unit's part announced, or the end
//   work_empty   each warp of these 1               key producer             it has been read
//   tile_full    key producer 1                     consumers, mask warp     a tile announced
//   tile_empty   each consumer warp and mask warp 1 key producer             it has been read
//   q_full       query warp, all 32 lanes           consumers                the unit's rows there
//   q_empty      each consumer warp 1               query warp               they may be overwritten
//   k_full       key producer 1, and bytes of K;    consumers                a part of a tile's keys there
//                all 32 lanes where they gather
//   k_empty      each consumer warp 1               key producer             it may be overwritten
//   v_full       value producer, likewise           consumers                a part of a tile's values there
//   v_empty      each consumer warp 1               value producer           it may be overwritten
//   mask_full    mask warp, all 32 lanes            consumers                a masked tile's bits there
//   mask_empty   each consumer warp 1               mask warp                they may be overwritten
// clang-format on

extern "C" __global__ void __launch_bounds__(FLASHMASK_TRAITS::kThreads, FLASHMASK_TRAITS::kCtas)
    FLASHMASK_ENTRY(const __grid_constant__ DecodeParams p) {
  using Traits = FLASHMASK_TRAITS;
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<DecodeShared<Traits>*>(memory);
  const uint32_t warp = ptx::uniform(threadIdx.x / 32);
  if (warp == 0) init_barriers(p, shared);
  if (threadIdx.x == 32 * Traits::kKeyWarp && !p.gathers) {
    ptx::prefetch(p.k);
    ptx::prefetch(p.v);
  }
  clear_queries(shared);
  __syncthreads();
  // Up to here under the end of the stream's previous kernel, as the next one may start under this one's.
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  if (warp < Traits::kKeyWarp) {
    if constexpr (Traits::kExchangesRegisters) ptx::increase_registers<Traits::kConsumerRegisters>();
    DecodeConsumer<Traits>(p, shared).run();
    return;
  }
  if constexpr (Traits::kExchangesRegisters) ptx::decrease_registers<Traits::kOtherRegisters>();
  if (warp == Traits::kKeyWarp || warp == Traits::kValueWarp) {
    DecodeProducer<Traits>(p, shared, warp == Traits::kKeyWarp).run();
  } else if (warp == Traits::kMaskWarp) {
    DecodeMaskBuilder<Traits>(p, shared).run();
  } else {
    DecodeQueryLoader<Traits>(p, shared).run();
  }
}

#undef FLASHMASK_ENTRY
#undef FLASHMASK_TRAITS
