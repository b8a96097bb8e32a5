// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/device/arrival_params.h"
#include "backends/cuda/ptx/system_scope.cuh"
#include "backends/cuda/ptx/timer.cuh"

namespace flashmask::cuda {

/// Waits until `needed` pieces have arrived and returns how many have. Past the time limit the first thread to give up
/// says so in the state, all others give up with it, and the result is kNoMoreWaits. Pauses between looks, so that many
/// waiting warps leave the memory to what they wait for.
__device__ __forceinline__ uint32_t wait_for_pieces(const ArrivalParams& p, uint32_t needed) {
  constexpr uint32_t kPauseNs = 100;
  const uint32_t begin = ptx::coarse_time();
  while (true) {
    const uint32_t arrived = ptx::load_acquire_system(p.state + kArrived);
    if (arrived >= needed) return arrived;
    if (ptx::coarse_time() - begin > p.limit) atomicCAS(p.state + kMissing, 0u, needed);
    if (ptx::load_acquire_system(p.state + kMissing) != 0) return kNoMoreWaits;
    __nanosleep(kPauseNs);
  }
}

}  // namespace flashmask::cuda
