// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace flashmask::ptx {

/// PTX ISA, "cvt.rn.f16x2.e4m3x2", from compute capability 8.9: two e4m3 numbers as f16, exactly.
__device__ __forceinline__ uint32_t e4m3_to_half2(uint16_t numbers) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(numbers));
  return halves;
}

}  // namespace flashmask::ptx
