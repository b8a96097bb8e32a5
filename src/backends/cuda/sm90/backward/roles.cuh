// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/sm90/backward/consumer.cuh"
#include "backends/cuda/sm90/backward/dq_accumulator.cuh"
#include "backends/cuda/sm90/backward/mask_builder.cuh"
#include "backends/cuda/sm90/backward/producer.cuh"

namespace flashmask::sm90::bwd {

template <typename Traits>
__device__ __forceinline__ void init_barriers(SharedStorage<Traits>& shared) {
  for (int i = 0; i < Traits::kStages; ++i) {
    ptx::barrier_init(shared.tile_full[i], 1);
    ptx::barrier_init(shared.mask_full[i], 32);
    ptx::barrier_init(shared.scores_full[i], 128 * Traits::kConsumers);
    ptx::barrier_init(shared.q_full[i], 1);
    ptx::barrier_init(shared.q_empty[i], Traits::kConsumerWarps + 2);  // the mask warp and the stage's store warp, too
    ptx::barrier_init(shared.dout_full[i], 1);
    ptx::barrier_init(shared.dout_empty[i], Traits::kConsumerWarps);
    ptx::barrier_init(shared.dq_full[i], Traits::kAlternate ? 128 : Traits::kConsumerWarps);
  }
  ptx::barrier_init(shared.dq_empty, 1);
  ptx::barrier_init(shared.k_full, 1);
  ptx::barrier_init(shared.kv_empty, Traits::kConsumerWarps);
  ptx::fence_barrier_init();
}

}  // namespace flashmask::sm90::bwd
