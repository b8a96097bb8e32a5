// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace flashmask::ptx {

/// PTX ISA, "%globaltimer", in units of 2^20 nanoseconds: one register.
__device__ __forceinline__ uint32_t coarse_time() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return static_cast<uint32_t>(now >> 20);
}

}  // namespace flashmask::ptx
