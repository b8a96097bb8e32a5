// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>

#include <cstdint>
#include <cuda/ptx>

namespace flashmask::ptx {

/// Where a box begins in a [64, seqlen, dim / 64, heads, batch] tensor map.
struct BoxOrigin {
  int32_t row, block, head, batch;
};

/// PTX ISA, "cp.async.bulk.tensor": loads a box; its bytes count towards `barrier`.
__device__ __forceinline__ void tma_load(void* shared, const CUtensorMap& map, uint64_t& barrier, const BoxOrigin& at) {
  const int32_t coordinates[5] = {0, at.row, at.block, at.head, at.batch};
  ::cuda::ptx::cp_async_bulk_tensor(::cuda::ptx::space_cluster, ::cuda::ptx::space_global, shared, &map, coordinates, &barrier);
}
/// PTX ISA, "cp.async.bulk.tensor": stores a box as part of the thread's current bulk group.
__device__ __forceinline__ void tma_store(const CUtensorMap& map, const void* shared, const BoxOrigin& at) {
  const int32_t coordinates[5] = {0, at.row, at.block, at.head, at.batch};
  ::cuda::ptx::cp_async_bulk_tensor(::cuda::ptx::space_global, ::cuda::ptx::space_shared, &map, coordinates, shared);
}
/// PTX ISA, "cp.async.bulk": loads `bytes`, a multiple of 16 at 16-byte boundaries, which count towards `barrier`.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, uint32_t bytes, uint64_t& barrier) {
  ::cuda::ptx::cp_async_bulk(::cuda::ptx::space_cluster, ::cuda::ptx::space_global, shared, global, bytes, &barrier);
}
/// PTX ISA, "cp.async.bulk": stores `bytes`, likewise, as part of the thread's current bulk group.
__device__ __forceinline__ void bulk_store(void* global, const void* shared, uint32_t bytes) {
  ::cuda::ptx::cp_async_bulk(::cuda::ptx::space_global, ::cuda::ptx::space_shared, global, shared, bytes);
}
/// PTX ISA, "cp.reduce.async.bulk": the same, adding to the floats that are there.
__device__ __forceinline__ void bulk_add(float* global, const float* shared, uint32_t bytes) {
  ::cuda::ptx::cp_reduce_async_bulk(::cuda::ptx::space_global, ::cuda::ptx::space_shared, ::cuda::ptx::op_add, global, shared, bytes);
}
/// PTX ISA, "cp.async.bulk.commit_group".
__device__ __forceinline__ void bulk_commit() { ::cuda::ptx::cp_async_bulk_commit_group(); }
/// PTX ISA, "cp.async.bulk.wait_group": until this thread's stores have been read from / have left shared memory.
__device__ __forceinline__ void bulk_wait_read() { ::cuda::ptx::cp_async_bulk_wait_group_read(::cuda::ptx::n32_t<0>{}); }
__device__ __forceinline__ void bulk_wait() { ::cuda::ptx::cp_async_bulk_wait_group(::cuda::ptx::n32_t<0>{}); }
/// PTX ISA, "fence.proxy.async": this thread's shared-memory writes become visible to tensor cores and copy engine.
__device__ __forceinline__ void fence_async_proxy() { ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared); }
/// PTX ISA, "fence.proxy.async": orders this thread's accesses to global memory, and what it has synchronised with, and those of
/// the copy engine.
__device__ __forceinline__ void fence_async_proxy_global() { ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_global); }
/// PTX ISA, "prefetch.tensormap".
__device__ __forceinline__ void prefetch(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(&map)) : "memory");
}

}  // namespace flashmask::ptx
