// SPDX-License-Identifier: Apache-2.0
#pragma once

// In place of the header of this name. The product is exact in float32, the sum rounded twice.

#include <cstdint>

#include "backends/cuda/ptx/mma.cuh"
#include "backends/cuda/ptx/registers.cuh"

namespace flashmask::ptx {

inline uint32_t fma_half2(uint32_t a, uint32_t b, uint32_t c) {
  const auto half = [&](int shift) {
    const auto number = [shift](uint32_t x) {
      const uint32_t bits = x >> shift & 0xffff, exponent_and_mantissa = bits & 0x7fff;
      return exponent_and_mantissa > 0x7c00 ? NAN : simulated::to_float<__half>(bits);
    };
    return number(a) * number(b) + number(c);
  };
  return pack<__half>(half(0), half(16));
}

}  // namespace flashmask::ptx
