// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace flashmask::ptx {

/// PTX ISA, "ld.acquire" at device scope: what the thread that wrote the value had done before is visible afterwards.
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* global) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(global) : "memory");
  return value;
}
/// PTX ISA, "red.release" at device scope: a thread that acquires the sum sees what this thread did before.
__device__ __forceinline__ void add_release(uint32_t* global, uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(global), "r"(value) : "memory");
}

}  // namespace flashmask::ptx
