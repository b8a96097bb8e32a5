// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <type_traits>

#include "backends/cuda/sm90/backward/columns/consumer.cuh"
#include "backends/cuda/sm90/backward/columns/dq_accumulator.cuh"
#include "backends/cuda/sm90/backward/mask_builder.cuh"
#include "backends/cuda/sm90/backward/producer.cuh"
#include "backends/cuda/sm90/backward/wide/accumulator.cuh"
#include "backends/cuda/sm90/backward/wide/consumer.cuh"
#include "backends/cuda/sm90/backward/wide/traits.cuh"

namespace flashmask::sm90::bwd {

/// The configuration of a row of kBackwardTiles.
template <typename Element, int kHeadDim, int kHeadDimV, int kConsumers, bool kSplit = false,
          typename Policies = BackwardPolicies<>>
using TraitsOf = std::conditional_t<find_tile(kBackwardTiles, kHeadDim, kHeadDimV, kConsumers).wide,
                                    WideTraits<Element, kHeadDim, kHeadDimV, kConsumers, kSplit, Policies>,
                                    BackwardTraits<Element, kHeadDim, kHeadDimV, kConsumers, kSplit, Policies>>;

/// The roles in which the kernels differ.
template <typename Traits>
struct Roles {
  using DqAccumulator = bwd::DqAccumulator<Traits>;
  using Consumer = bwd::Consumer<Traits>;
};
/// In place of a store warp where consumers add dq from registers.
struct NoAccumulator {
  template <typename... Arguments>
  __device__ explicit NoAccumulator(const Arguments&...) {}
  __device__ void run() const {}
};
template <typename Traits>
  requires Traits::kWide
struct Roles<Traits> {
  using DqAccumulator = std::conditional_t<Traits::kDqFromRegisters, NoAccumulator, WideAccumulator<Traits>>;
  using Consumer = WideConsumer<Traits>;
};

/// Arrivals of the consumers that release a tile's rows, see release_rows.
template <typename Traits>
inline constexpr int kRowReleases = Traits::kConsumerWarps * (kMaySumIntegers<Traits> ? 32 : 1);

template <typename Traits>
__device__ __forceinline__ void init_barriers(SharedStorage<Traits>& shared) {
  for (int i = 0; i < Traits::kStages; ++i) {
    ptx::barrier_init(shared.tile_full[i], 1);
    ptx::barrier_init(shared.mask_full[i], 32);
    ptx::barrier_init(shared.scores_full[i], 128 * Traits::kConsumers);
    ptx::barrier_init(shared.q_full[i], 1);
    ptx::barrier_init(shared.q_empty[i], kRowReleases<Traits> + 2);  // the mask warp and the stage's store warp, too
    if (i < Traits::kDoutStages) {
      ptx::barrier_init(shared.dout_full[i], 1);
      ptx::barrier_init(shared.dout_empty[i], Traits::kConsumerWarps);
    }
    ptx::barrier_init(shared.dq_full[i], Traits::kAlternate ? 128 : Traits::kConsumerWarps);
  }
  ptx::barrier_init(shared.dq_empty, 1);
  if constexpr (Traits::kSharesRows) {
    ptx::barrier_init(shared.pair.claim_full, 1);
    ptx::barrier_init(shared.pair.claim_empty, 1);
    ptx::barrier_init(shared.pair.part_full, 1);
    ptx::barrier_init(shared.pair.part_empty, 1);
  }
  if constexpr (kHalves<Traits>) {
    ptx::barrier_init(shared.halves.ds_empty, Traits::kConsumerWarps);
    shared.halves.ones.fill();  // the fence that makes barriers known to the copy engine does this to tensor cores
  }
  ptx::barrier_init(shared.k_full, 1);
  ptx::barrier_init(shared.kv_empty, Traits::kConsumerWarps);
  ptx::barrier_init(shared.padded_full, 1);
  ptx::fence_barrier_init();
}

template <typename Traits>
  requires Traits::kWide
__device__ __forceinline__ void init_barriers(SharedStorage<Traits>& shared) {
  // The mask warp, and both store warps.
  constexpr int kFollowers = Traits::kDqFromRegisters ? 1 : 3;
  for (int i = 0; i < Traits::kStages; ++i) {
    ptx::barrier_init(shared.tile_full[i], 1);
    ptx::barrier_init(shared.mask_full[i], 32);
    ptx::barrier_init(shared.scores_full[i], 128 * Traits::kConsumers);
    ptx::barrier_init(shared.q_full[i], 1);
    ptx::barrier_init(shared.q_empty[i], kRowReleases<Traits> + kFollowers);
  }
  for (int i = 0; i < Traits::kDoutStages; ++i) {
    ptx::barrier_init(shared.dout_full[i], 1);
    ptx::barrier_init(shared.dout_empty[i], Traits::kConsumerWarps);
  }
  if constexpr (Traits::kPair) {
    for (int i = 0; i < Traits::kStages; ++i) {
      ptx::barrier_init(shared.pair.ds_full[i], 1);
      ptx::barrier_init(shared.pair.ds_empty[i], Traits::kConsumerWarps);
    }
    ptx::barrier_init(shared.pair.claim_full, 1);
    ptx::barrier_init(shared.pair.claim_empty, 1);
  }
  if constexpr (!Traits::kDqFromRegisters) {
    for (int i = 0; i < Traits::kConsumers; ++i) {
      ptx::barrier_init(shared.dq.full[i], 4);
      ptx::barrier_init(shared.dq.empty[i], 1);
    }
  }
  ptx::barrier_init(shared.k_full, 1);
  ptx::barrier_init(shared.kv_empty, Traits::kConsumerWarps);
  ptx::barrier_init(shared.padded_full, 1);
  ptx::fence_barrier_init();
}

}  // namespace flashmask::sm90::bwd
