// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/sm90/forward/consumer.cuh"
#include "backends/cuda/sm90/forward/mask_builder.cuh"
#include "backends/cuda/sm90/forward/producer.cuh"

namespace flashmask::sm90 {

template <typename Traits>
__device__ __forceinline__ void init_barriers(SharedStorage<Traits>& shared) {
  for (int i = 0; i < Traits::kQBuffers; ++i) {
    ptx::barrier_init(shared.q_full[i], 1);
    ptx::barrier_init(shared.q_empty[i], Traits::kConsumerWarps + Traits::kConsumers);
  }
  constexpr int kKSlots = Traits::kStages * Traits::kKParts,
                kSlots = kKSlots > Traits::kVSlots ? kKSlots : Traits::kVSlots;
  for (int i = 0; i < kSlots; ++i) {
    const int stage = i / Traits::kKParts, part = i % Traits::kKParts;
    if (i < kKSlots) ptx::barrier_init(shared.k_full[stage][part], 1);
    if (i < Traits::kVSlots) ptx::barrier_init(shared.v_full[i], 1);
    // Mask warps follow the first parts, which announce tiles.
    const int followers = part == 0 ? Traits::kConsumers : 0;
    constexpr int kReaders = Traits::kConsumerWarps * (Traits::kAllLanesRead ? 32 : 1);
    if (i < kKSlots) ptx::barrier_init(shared.k_empty[stage][part], kReaders + followers);
    if (i < Traits::kVSlots) ptx::barrier_init(shared.v_empty[i], Traits::kConsumerWarps);
  }
  for (int n = 0; n < Traits::kConsumers * Traits::kMaskSlots * Traits::kMaskParts; ++n) {
    // Every lane that wrote or read bits arrives.
    ptx::barrier_init((&shared.mask_full[0][0][0])[n], 32);
    ptx::barrier_init((&shared.mask_empty[0][0][0])[n], 128 / Traits::kMaskParts);
  }
  ptx::barrier_init(shared.padded_full, 1);
  ptx::fence_barrier_init();
}

}  // namespace flashmask::sm90
