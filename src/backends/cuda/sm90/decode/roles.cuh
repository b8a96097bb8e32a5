// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/sm90/decode/consumer.cuh"
#include "backends/cuda/sm90/decode/mask_builder.cuh"
#include "backends/cuda/sm90/decode/producer.cuh"
#include "backends/cuda/sm90/decode/query_loader.cuh"

namespace flashmask::sm90 {

template <typename Traits>
__device__ __forceinline__ void init_barriers(DecodeShared<Traits>& shared) {
  constexpr uint32_t kWarps = Traits::kConsumerThreads / 32;
  const auto init = [](uint64_t* full, uint64_t* empty, int count, uint32_t full_arrivals, uint32_t empty_arrivals) {
    for (int n = 0; n < count; ++n) {
      ptx::barrier_init(full[n], full_arrivals);
      ptx::barrier_init(empty[n], empty_arrivals);
    }
  };
  init(shared.work_full, shared.work_empty, Traits::kWorks, 1, kWarps + 2);
  init(shared.tile_full, shared.tile_empty, Traits::kTiles, 1, kWarps + 1);
  init(shared.k_full, shared.k_empty, Traits::kSlots, 1, kWarps);
  init(shared.v_full, shared.v_empty, Traits::kSlots, 1, kWarps);
  init(shared.q_full, shared.q_empty, Traits::kQueries, 32, kWarps);
  init(shared.mask_full, shared.mask_empty, Traits::kMasks, 32, kWarps);
  ptx::fence_barrier_init();
}

}  // namespace flashmask::sm90
