// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/ptx/address.cuh"

namespace flashmask::ptx {

/// PTX ISA, "cp.async.mbarrier.arrive.noinc": one arrival, once all cp.async of the calling thread have come.
__device__ __forceinline__ void arrive_after_copies(uint64_t& barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

/// PTX ISA, "atom.acq_rel" at device scope: adds, and returns the sum before. What the thread has seen and done before
/// is visible to threads that acquire a later sum.
__device__ __forceinline__ uint32_t add_acquire_release(uint32_t* global, uint32_t value) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(global_address(global)), "r"(value)
               : "memory");
  return before;
}

}  // namespace flashmask::ptx
