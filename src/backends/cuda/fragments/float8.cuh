// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/ptx/half2.cuh"

namespace flashmask::cuda {

/// The factor that e4m3_to_half2 leaves out.
inline constexpr float kE4m3Unit = 256;

/// Two e4m3 numbers, the high bytes of x's halves, as f16, exactly but for a factor of 2^-8: the bits of an e4m3 number
/// are those of an f16 seven places up, whose exponent's bias is 8 more. Before 8.9 there is no instruction for it.
__device__ __forceinline__ uint32_t e4m3_to_half2(uint32_t x) {
  constexpr uint32_t kOverflow = 0x78907890, kZero = 0, kNegativeZero = 0x80008000;
  const uint32_t numbers = (x >> 1 & 0x3f803f80) | (x & 0x80008000);
  // Read as a number NaN is above all others: times 37376 it alone is infinite, and infinity times 0 is NaN.
  const uint32_t large = ptx::fma_half2(numbers, kOverflow, kNegativeZero);
  return ptx::fma_half2(large, kZero, numbers);
}

}  // namespace flashmask::cuda
