// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/ptx/address.cuh"

namespace flashmask::ptx {

/// PTX ISA, "%cluster_ctarank": the calling CTA's number in its cluster.
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
/// PTX ISA, "barrier.cluster": all threads of the cluster. What they have done before is visible to all afterwards.
__device__ __forceinline__ void cluster_sync() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
/// PTX ISA, "mapa": the address of `p` in the shared memory of CTA `rank` of the cluster.
__device__ __forceinline__ uint32_t shared_address_in(const void* p, uint32_t rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(p)), "r"(rank));
  return address;
}
/// PTX ISA, "mbarrier.arrive" on another CTA's barrier, after products have read what that CTA sent. Releases no stores
/// to it: at its scope that would wait for all of the thread's, reductions in global memory included.
__device__ __forceinline__ void arrive_remote_after_reads(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/// PTX ISA, "mbarrier.arrive" on another CTA's barrier; what the thread has done is visible to who waits there by
/// wait_cluster.
__device__ __forceinline__ void arrive_remote(uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/// As wait, for another CTA's arrivals by arrive_remote.
__device__ __forceinline__ void wait_cluster(uint64_t& barrier, uint32_t parity) {
  uint32_t complete;
  do {
    asm volatile(
        "{.reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p;}"
        : "=r"(complete)
        : "r"(shared_address(&barrier)), "r"(parity)
        : "memory");
  } while (!complete);
}
/// PTX ISA, "st.async": stores a word in another CTA's shared memory; its bytes count towards its `barrier`.
__device__ __forceinline__ void store_remote(uint32_t address, uint32_t value, uint32_t barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(address),
               "r"(value), "r"(barrier)
               : "memory");
}
/// As store_remote, of four floats.
__device__ __forceinline__ void store_four_remote(uint32_t address, const float* four, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
      "f"(four[0]), "f"(four[1]), "f"(four[2]), "f"(four[3]), "r"(barrier)
      : "memory");
}
/// PTX ISA, "cp.async.bulk": copies `bytes` to another CTA's shared memory; they count towards its `barrier`.
__device__ __forceinline__ void bulk_copy_remote(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "r"(shared_address(from)), "r"(bytes), "r"(barrier)
               : "memory");
}

}  // namespace flashmask::ptx
