// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/ptx/address.cuh"

namespace flashmask::ptx {

/// PTX ISA, "red" of a vector: adds four floats to the four at `global`, a multiple of 16 bytes. Each addition by
/// itself is atomic on the device.
__device__ __forceinline__ void add_four(float* global, const float* values) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(global_address(global)),
               "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3])
               : "memory");
}
/// PTX ISA, "red": adds two integers, whose bits are in `two`, at once, as first + 2^32 second: of such numbers, too, a
/// sum is that of the firsts and the seconds.
__device__ __forceinline__ void add_two_integers(float* global, const float* two) {
  asm volatile(
      "{.reg .s32 high; .reg .b64 both;"
      "shr.s32 high, %1, 31; add.s32 high, high, %2; mov.b64 both, {%1, high};"
      "red.relaxed.gpu.global.add.u64 [%0], both;}" ::"l"(global_address(global)),
      "r"(__float_as_int(two[0])), "r"(__float_as_int(two[1]))
      : "memory");
}

}  // namespace flashmask::ptx
