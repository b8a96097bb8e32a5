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

void expect_exact(uint32_t bits, uint32_t from) {
  const double want = number_of(from);
  if (std::isnan(want)) {
    EXPECT_GT(bits & 0x7fff, 0x7c00u) << from;
  } else {
    EXPECT_EQ(ptx::simulated::to_float<__half>(bits) * cuda::kE4m3Unit, want) << from;
    EXPECT_EQ(bits >> 15, from >> 7) << from;
  }
}
void expect_exact_pair(uint32_t pair, uint32_t first, uint32_t second) {
  expect_exact(pair & 0xffff, first);
  expect_exact(pair >> 16, second);
}

TEST(Float8, EveryNumberIsExactBesideOthers) {
  for (uint32_t a = 0; a < 256; ++a) {
    const uint32_t b = 255 - a, c = a ^ 0x55, d = a ^ 0xaa, bytes = d << 24 | c << 16 | b << 8 | a;
    const cuda::HalfPairs neighbours = cuda::e4m3_neighbours(bytes), every_other = cuda::e4m3_every_other(bytes);
    expect_exact_pair(neighbours.first, a, b);
    expect_exact_pair(neighbours.second, c, d);
    expect_exact_pair(every_other.first, a, c);
    expect_exact_pair(every_other.second, b, d);
  }
}

}  // namespace
}  // namespace flashmask::test
