// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/ptx/float8.cuh"
#include "backends/cuda/ptx/half2.cuh"

namespace flashmask::cuda {

/// Two pairs of f16.
struct HalfPairs {
  uint32_t first, second;
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890

/// The factor that conversions leave out.
inline constexpr float kE4m3Unit = 1;

/// Four e4m3 numbers as f16: the first two, and the others.
__device__ __forceinline__ HalfPairs e4m3_neighbours(uint32_t bytes) {
  HalfPairs pairs;
  ptx::e4m3_to_half2(bytes, pairs.first, pairs.second);
  return pairs;
}
/// Likewise: the first and third, and the others.
__device__ __forceinline__ HalfPairs e4m3_every_other(uint32_t bytes) {
  return e4m3_neighbours(__byte_perm(bytes, 0, 0x3120));
}

#else

inline constexpr float kE4m3Unit = 256;

/// Two e4m3 numbers, the high bytes of x's halves, as f16, exactly but for a factor of 2^-8: the bits of an e4m3 number
/// are those of an f16 seven places up, whose exponent's bias is 8 more.
__device__ __forceinline__ uint32_t e4m3_to_half2(uint32_t x) {
  constexpr uint32_t kOverflow = 0x78907890, kZero = 0, kNegativeZero = 0x80008000;
  const uint32_t numbers = (x >> 1 & 0x3f803f80) | (x & 0x80008000);
  // Read as a number NaN is above all others: times 37376 it alone is infinite, and infinity times 0 is NaN.
  const uint32_t large = ptx::fma_half2(numbers, kOverflow, kNegativeZero);
  return ptx::fma_half2(large, kZero, numbers);
}
__device__ __forceinline__ HalfPairs e4m3_neighbours(uint32_t bytes) {
  return {e4m3_to_half2(__byte_perm(bytes, 0, 0x1100)), e4m3_to_half2(__byte_perm(bytes, 0, 0x3322))};
}
__device__ __forceinline__ HalfPairs e4m3_every_other(uint32_t bytes) {
  return {e4m3_to_half2(bytes << 8), e4m3_to_half2(bytes)};
}

#endif

}  // namespace flashmask::cuda
