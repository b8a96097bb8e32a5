// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/ptx/address.cuh"

namespace flashmask::ptx {

/// PTX ISA, "cp.async": 16 bytes from global to shared memory, past the L1 cache; zeros, and `global` is not read,
/// unless `inside`. Both are aligned to 16 bytes.
__device__ __forceinline__ void cp_async_16(uint32_t shared, const void* global, bool inside) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global_address(global)),
               "r"(inside ? 16 : 0)
               : "memory");
}

/// PTX ISA, "cp.async.commit_group": the calling thread's copies since the last one are a group.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// PTX ISA, "cp.async.wait_group": until at most `kPending` of the calling thread's newest groups are under way. Other
/// threads see what has arrived after a barrier.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace flashmask::ptx
