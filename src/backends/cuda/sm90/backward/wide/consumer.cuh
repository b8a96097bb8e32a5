// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <type_traits>

#include "backends/cuda/sm90/backward/wide/pair_half.cuh"
#include "backends/cuda/sm90/backward/wide/register_half.cuh"
#include "backends/cuda/sm90/backward/wide/staging_half.cuh"

namespace flashmask::sm90::bwd {

/// A wide kernel's consumer: one of two halves, whose code has the warpgroup's number as a constant.
template <typename Traits>
class WideConsumer {
 public:
  using Shared = SharedStorage<Traits>;
  using Params = typename Traits::Params;
  __device__ __forceinline__ WideConsumer(const Params& p, Shared& shared, uint32_t warpgroup)
      : p_(p), shared_(shared), warpgroup_(warpgroup) {}

  __device__ __forceinline__ void run() {
    if (warpgroup_ == 0) {
      Half<0>(p_, shared_).run();
    } else {
      Half<1>(p_, shared_).run();
    }
  }

 private:
  template <uint32_t kWarpgroup>
  using Half = std::conditional_t<
      Traits::kPair, PairHalf<Traits, kWarpgroup>,
      std::conditional_t<Traits::kDqFromRegisters, RegisterHalf<Traits, kWarpgroup>, StagingHalf<Traits, kWarpgroup>>>;

  const Params& p_;
  Shared& shared_;
  const uint32_t warpgroup_;
};

}  // namespace flashmask::sm90::bwd
