// SPDX-License-Identifier: Apache-2.0

// Numbers of e4m3 as the kernels make f16 of them.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>

#include "backends/cuda/fragments/float8.cuh"
#include "backends/cuda/ptx/mma.cuh"

namespace flashmask::test {
namespace {

/// The number by the format's definition; NaN if it is none.
double number_of(uint32_t byte) {
  const int exponent = static_cast<int>(byte >> 3 & 15), mantissa = static_cast<int>(byte & 7);
  if (exponent == 15 && mantissa == 7) return NAN;
  const double x = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return byte & 0x80 ? -x : x;
}

TEST(Float8, EveryNumberIsExact) {
  for (uint32_t byte = 0; byte < 256; ++byte) {
    // Whatever the low bytes are.
    const uint32_t two = cuda::e4m3_to_half2(byte << 24 | 0xff0000 | (255 - byte) << 8 | byte);
    for (const auto& [bits, from] : {std::pair{two >> 16, byte}, std::pair{two & 0xffff, 255 - byte}}) {
      const double want = number_of(from);
      if (std::isnan(want)) {
        EXPECT_GT(bits & 0x7fff, 0x7c00u) << from;
      } else {
        EXPECT_EQ(ptx::simulated::to_float<__half>(bits) * cuda::kE4m3Unit, want) << from;
        EXPECT_EQ(bits >> 15, from >> 7) << from;
      }
    }
  }
}

}  // namespace
}  // namespace flashmask::test
