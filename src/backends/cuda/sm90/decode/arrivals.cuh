// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/ptx/barrier.cuh"

namespace flashmask::sm90 {

/// Arrivals of a warp by arrive_warp. In a build with delays all lanes arrive, as racecheck takes an arrival as
/// ordering for its own lane alone.
#ifdef FLASHMASK_STRESS_DELAYS
inline constexpr uint32_t kWarpArrivals = 32;
#else
inline constexpr uint32_t kWarpArrivals = 1;
#endif

/// A warp's kWarpArrivals arrivals, after what all of its lanes have done.
__device__ __forceinline__ void arrive_warp(uint64_t& barrier) {
  if constexpr (kWarpArrivals == 1) {
    ptx::arrive_once(barrier);
  } else {
    ptx::arrive(barrier);
  }
}

}  // namespace flashmask::sm90
