// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>

#include <cstdint>

#include "backends/cuda/ptx/address.cuh"

namespace flashmask::ptx {

/// Origin of a box in a tensor map, see sm90::tensor_map.
struct BoxOrigin {
  int32_t row, block, head, batch;
};

/// PTX ISA, "cp.async.bulk.tensor": loads a box that begins at `column` of its blocks; its bytes count towards
/// `barrier`.
__device__ __forceinline__ void tma_load(void* shared, const CUtensorMap& map, uint64_t& barrier, const BoxOrigin& at,
                                         int32_t column = 0) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, "
      "%6}], [%7];" ::"r"(shared_address(shared)),
      "l"(&map), "r"(column), "r"(at.row), "r"(at.block), "r"(at.head), "r"(at.batch), "r"(shared_address(&barrier))
      : "memory");
}
/// PTX ISA, "cp.async.bulk.tensor": stores a box likewise, as part of the thread's current bulk group.
__device__ __forceinline__ void tma_store(const CUtensorMap& map, const void* shared, const BoxOrigin& at,
                                          int32_t column = 0) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4, %5}], [%6];" ::"l"(&map),
      "r"(column), "r"(at.row), "r"(at.block), "r"(at.head), "r"(at.batch), "r"(shared_address(shared))
      : "memory");
}
/// Copies rows in blocks of 64 columns: all blocks at once, or each by itself, from a column of its own, so that rows
/// may end in any block.
template <bool kOneCopy>
struct Blocks {
  /// Loads kBlocks blocks of kRows rows from `at` on.
  template <int kBlocks, int kRows, typename Element>
  __device__ __forceinline__ static void load(Element* shared, const CUtensorMap& map, uint64_t& barrier,
                                              const BoxOrigin& at) {
    if constexpr (kOneCopy) {
      tma_load(shared, map, barrier, at);
    } else {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block)
        tma_load(shared + block * kRows * 64, map, barrier, BoxOrigin{at.row, 0, at.head, at.batch},
                 64 * (at.block + block));
    }
  }
  /// Stores the block at `at`.
  __device__ __forceinline__ static void store(const CUtensorMap& map, const void* shared, const BoxOrigin& at) {
    if constexpr (kOneCopy) {
      tma_store(map, shared, at);
    } else {
      tma_store(map, shared, BoxOrigin{at.row, 0, at.head, at.batch}, 64 * at.block);
    }
  }
};
/// PTX ISA, "cp.async.bulk": loads `bytes`, a multiple of 16 at 16-byte boundaries, which count towards `barrier`.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, uint32_t bytes, uint64_t& barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(global_address(global)), "r"(bytes), "r"(shared_address(&barrier))
               : "memory");
}
/// PTX ISA, "cp.async.bulk": stores `bytes`, likewise, as part of the thread's current bulk group.
__device__ __forceinline__ void bulk_store(void* global, const void* shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global_address(global)),
               "r"(shared_address(shared)), "r"(bytes)
               : "memory");
}
/// PTX ISA, "cp.reduce.async.bulk": adds `bytes`, likewise, to the floats in global memory.
__device__ __forceinline__ void bulk_add(float* global, const float* shared, uint32_t bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global_address(global)),
      "r"(shared_address(shared)), "r"(bytes)
      : "memory");
}
/// bulk_add of 32-bit integers, stored in place of the floats.
__device__ __forceinline__ void bulk_add_integers(float* global, const float* shared, uint32_t bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.s32 [%0], [%1], %2;" ::"l"(global_address(global)),
      "r"(shared_address(shared)), "r"(bytes)
      : "memory");
}
/// PTX ISA, "cp.async.bulk.commit_group".
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
/// PTX ISA, "cp.async.bulk.wait_group": until this thread's stores have been read from / have left shared memory.
__device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
/// PTX ISA, "fence.proxy.async": this thread's shared-memory writes become visible to tensor cores and copy engine.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
/// PTX ISA, "fence.proxy.async": orders the copy engine's accesses to global memory with this thread's, and with all
/// that it has synchronised with.
__device__ __forceinline__ void fence_async_proxy_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
/// PTX ISA, "prefetch.tensormap".
__device__ __forceinline__ void prefetch(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(&map)) : "memory");
}

}  // namespace flashmask::ptx
