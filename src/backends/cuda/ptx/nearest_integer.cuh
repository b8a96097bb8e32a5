// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace flashmask::ptx {

/// PTX ISA, "cvt": the bits of the integer nearest to `x`, in its register: with one more for each, ptxas runs out of
/// them. The instruction shares a pipe with the exponentials, eight times slower than that of multiply-adds.
__device__ __forceinline__ float nearest_integer(float x) {
  asm("{.reg .s32 integer; cvt.rni.s32.f32 integer, %0; mov.b32 %0, integer;}" : "+f"(x));
  return x;
}

}  // namespace flashmask::ptx
