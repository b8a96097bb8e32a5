// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace flashmask {

/// Which role waits, in a build with delays. kWarp: any warp, where all do the same.
enum class Role : uint32_t { kProducer = 1, kConsumer = 2, kStore = 3, kMask = 4, kWarp = 5 };

/// Does nothing, except in a build with FLASHMASK_STRESS_DELAYS: then a random pause of up to 4 us, so that every
/// order of events between the roles comes up and a missing barrier shows.
template <Role kRole>
__device__ __forceinline__ void delay() {
#ifdef FLASHMASK_STRESS_DELAYS
  uint32_t x = static_cast<uint32_t>(clock64()) ^ (blockIdx.x * 0x9E3779B9u) ^ ((threadIdx.x / 32 + 1) * 0x85EBCA6Bu) ^
               (static_cast<uint32_t>(kRole) << 28);
  x ^= x >> 16;
  x *= 0x7FEB352Du;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  x ^= x >> 16;
  x = __shfl_sync(0xffffffff, x, 0);
  if (x & 1) __nanosleep(x >> 20);
#endif
}

}  // namespace flashmask
