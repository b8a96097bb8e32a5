// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/ptx/tma.cuh"

namespace flashmask::ptx {

/// tma_load of a box that nothing reads again: PTX ISA, ".L2::cache_hint", with the policy that
/// createpolicy.fractional.L2::evict_first makes for all of it.
__device__ __forceinline__ void tma_load_once(void* shared, const CUtensorMap& map, uint64_t& barrier,
                                              const BoxOrigin& at, int32_t column = 0) {
  constexpr uint64_t kEvictFirst = 0x12F0000000000000;
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, "
      "%3, %4, %5, %6}], [%7], %8;" ::"r"(shared_address(shared)),
      "l"(&map), "r"(column), "r"(at.row), "r"(at.block), "r"(at.head), "r"(at.batch), "r"(shared_address(&barrier)),
      "l"(kEvictFirst)
      : "memory");
}

}  // namespace flashmask::ptx
