// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace flashmask::ptx {

// The bits of the integer nearest to `x`, in its register: with one more for each, ptxas runs out of them.

/// PTX ISA, "cvt". It shares a pipe with the exponentials, eight times slower than that of multiply-adds.
__device__ __forceinline__ float nearest_integer(float x) {
  asm("{.reg .s32 integer; cvt.rni.s32.f32 integer, %0; mov.b32 %0, integer;}" : "+f"(x));
  return x;
}

/// nearest_integer by multiply-adds, |x| <= 2^29. The low bits of x + 1.5 * 2^23 are the integer nearest to x, but only
/// 23 of them: one sum, `high`, takes x / -256, the other the remainder of x. The zero of `high` is such that the
/// joint bits, low - 256 high, are the integer's.
__device__ __forceinline__ float nearest_integer_by_adds(float x) {
  constexpr float kUnit = 256, kLowZero = 0x1.8p23F, kHighZero = 0x800000 + 0x4b4000;
  asm("{ .reg .f32 low, high; .reg .b32 low_bits, high_bits;\n"
      "  fma.rn.f32 high, %0, %1, %2;\n"
      "  fma.rn.f32 low, high, %3, %4;\n"
      "  add.rn.f32 low, low, %0;\n"
      "  mov.b32 low_bits, low;\n"
      "  mov.b32 high_bits, high;\n"
      "  mad.lo.s32 low_bits, high_bits, %5, low_bits;\n"
      "  mov.b32 %0, low_bits; }"
      : "+f"(x)
      : "f"(-1 / kUnit), "f"(kHighZero), "f"(kUnit), "f"(kLowZero - kUnit * kHighZero), "n"(-static_cast<int>(kUnit)));
  return x;
}

}  // namespace flashmask::ptx
