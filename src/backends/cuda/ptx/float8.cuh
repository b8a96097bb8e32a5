// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace flashmask::ptx {

/// PTX ISA, "cvt.rn.f16x2.e4m3x2", from compute capability 8.9: four e4m3 numbers as f16, exactly, the lower two in
/// `low`. Taken apart in PTX, the register's upper half needs no shift.
__device__ __forceinline__ void e4m3_to_half2(uint32_t numbers, uint32_t& low, uint32_t& high) {
  asm("{\n"
      ".reg .b16 lower, upper;\n"
      "mov.b32 {lower, upper}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, lower;\n"
      "cvt.rn.f16x2.e4m3x2 %1, upper;\n"
      "}"
      : "=r"(low), "=r"(high)
      : "r"(numbers));
}

}  // namespace flashmask::ptx
