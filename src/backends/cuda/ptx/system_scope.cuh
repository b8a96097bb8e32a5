// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace flashmask::ptx {

/// PTX ISA, "ld.acquire" at system scope: what another device, a copy engine or the host
/// had done before it wrote the value is visible afterwards.
__device__ __forceinline__ uint32_t load_acquire_system(const uint32_t* global) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(global) : "memory");
  return value;
}
/// PTX ISA, "st.release" at system scope: who acquires the value, on any device or the host, sees what this thread did
/// before.
__device__ __forceinline__ void store_release_system(uint32_t* global, uint32_t value) {
  asm volatile("st.release.sys.u32 [%0], %1;" ::"l"(global), "r"(value) : "memory");
}

}  // namespace flashmask::ptx
