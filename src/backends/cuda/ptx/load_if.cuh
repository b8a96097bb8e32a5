// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <type_traits>

#include "backends/cuda/ptx/address.cuh"

namespace flashmask::ptx {

/// PTX ISA, "ld.global.nc" under a predicate: `to` becomes *from if `condition`, and keeps its value otherwise. Without
/// a branch nothing waits for what is loaded before it is used.
template <typename T>
__device__ __forceinline__ void load_if(bool condition, const T* from, T& to) {
  static_assert(std::is_same_v<T, int32_t> || std::is_same_v<T, float>);
  if constexpr (std::is_same_v<T, float>) {
    asm("{\n"
        ".reg .pred there;\n"
        "setp.ne.b32 there, %2, 0;\n"
        "@there ld.global.nc.f32 %0, [%1];\n"
        "}"
        : "+f"(to)
        : "l"(global_address(from)), "r"(static_cast<int>(condition)));
  } else {
    asm("{\n"
        ".reg .pred there;\n"
        "setp.ne.b32 there, %2, 0;\n"
        "@there ld.global.nc.b32 %0, [%1];\n"
        "}"
        : "+r"(to)
        : "l"(global_address(from)), "r"(static_cast<int>(condition)));
  }
}

}  // namespace flashmask::ptx
