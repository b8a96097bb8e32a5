// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace flashmask::ptx {

/// Addresses as the instructions take them that name their state space.
__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ uint64_t global_address(const void* p) { return __cvta_generic_to_global(p); }

}  // namespace flashmask::ptx
