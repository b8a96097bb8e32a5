// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/sm90/decode/arrivals.cuh"
#include "backends/cuda/sm90/decode/consumer.cuh"
#include "backends/cuda/sm90/decode/factor_loader.cuh"
#include "backends/cuda/sm90/decode/mask_builder.cuh"
#include "backends/cuda/sm90/decode/producer.cuh"
#include "backends/cuda/sm90/decode/query_loader.cuh"

namespace flashmask::sm90 {

/// Makes the barriers, with all lanes of a warp.
template <typename Traits>
__device__ __forceinline__ void init_barriers(const DecodeParams& p, DecodeShared<Traits>& shared) {
  constexpr uint32_t kWarps = Traits::kConsumerThreads / 32;
  const uint32_t copiers = p.gathers ? 32 : 1, fillers = Traits::kFloat8 ? 32 : copiers;
  const auto init = [](uint64_t* full, uint64_t* empty, int count, uint32_t full_arrivals, uint32_t empty_arrivals) {
    if (const auto n = static_cast<int>(ptx::lane()); n < count) {
      ptx::barrier_init(full[n], full_arrivals);
      ptx::barrier_init(empty[n], empty_arrivals);
    }
  };
  init(shared.work_full, shared.work_empty, Traits::kWorks, 1, (kWarps + 2) * kWarpArrivals);
  const uint32_t tile_readers = kWarps + 1 + (Traits::kFloat8 && p.has_factors_by_key() ? 1 : 0);
  init(shared.tile_full, shared.tile_empty, Traits::kTiles, 1, tile_readers * kWarpArrivals);
  init(shared.k_full, shared.k_empty, Traits::kSlots, fillers, kWarps * kWarpArrivals);
  init(shared.v_full, shared.v_empty, Traits::kSlots, fillers, kWarps * kWarpArrivals);
  if constexpr (Traits::kFloat8) {
    auto& float8 = shared.float8;
    init(float8.k_copied, float8.v_copied, Traits::kCopySlots, copiers, copiers);
    init(float8.factors_full, float8.factors_empty, float8.kFactors, 32, kWarps * kWarpArrivals);
  }
  init(shared.q_full, shared.q_empty, Traits::kQueries, 32, kWarps * kWarpArrivals);
  init(shared.mask_full, shared.mask_empty, Traits::kMasks, 32, kWarps * kWarpArrivals);
  ptx::fence_barrier_init();
}

/// Zeros for rows and columns of q that are not there, by all threads.
template <typename Traits>
__device__ __forceinline__ void clear_queries(DecodeShared<Traits>& shared) {
  auto* const chunks = reinterpret_cast<uint4*>(&shared.q[0][0]);
#pragma unroll 4
  for (int n = static_cast<int>(threadIdx.x); n < static_cast<int>(sizeof(shared.q) / sizeof(uint4));
       n += Traits::kThreads)
    chunks[n] = {};
  if constexpr (Traits::kBoxesQueries) ptx::fence_async_proxy();  // copies of rows come after
}

}  // namespace flashmask::sm90
