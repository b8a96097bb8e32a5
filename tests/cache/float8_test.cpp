// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>

#include "flashmask/float16.h"

namespace flashmask {
namespace {

/// The number as the format defines it.
double value_of(int bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return bits & 0x80 ? -magnitude : magnitude;
}

TEST(Float8, EveryNumberThereAndBack) {
  for (int bits = 0; bits < 256; ++bits) {
    const float x = float8_e4m3_to_float(static_cast<uint8_t>(bits));
    if ((bits & 0x7f) == 0x7f) {
      EXPECT_TRUE(std::isnan(x)) << bits;
    } else {
      EXPECT_EQ(x, value_of(bits)) << bits;
    }
    EXPECT_EQ(float_to_float8_e4m3(x) & 0x7f, bits & 0x7f) << bits;
  }
}

TEST(Float8, RoundsToNearestEven) {
  for (int bits = 0; bits < 0x7e; ++bits) {
    const double low = value_of(bits), high = value_of(bits + 1), middle = (low + high) / 2;
    const int even = bits % 2 == 0 ? bits : bits + 1;
    for (const float sign : {1.0f, -1.0f}) {
      const int of_sign = sign < 0 ? 0x80 : 0;
      const auto round = [&](double x) { return float_to_float8_e4m3(sign * static_cast<float>(x)); };
      EXPECT_EQ(round(middle), even | of_sign) << bits;
      EXPECT_EQ(round(std::nextafter(static_cast<float>(middle), 0.0f)), bits | of_sign) << bits;
      EXPECT_EQ(round(std::nextafter(static_cast<float>(middle), 1e9f)), (bits + 1) | of_sign) << bits;
    }
  }
}

TEST(Float8, SaturatesAndKeepsNaN) {
  for (const float x : {448.0f, 449.0f, 1e30f, INFINITY}) {
    EXPECT_EQ(float_to_float8_e4m3(x), 0x7e) << x;
    EXPECT_EQ(float_to_float8_e4m3(-x), 0xfe) << x;
  }
  EXPECT_EQ(float_to_float8_e4m3(NAN) & 0x7f, 0x7f);
}

}  // namespace
}  // namespace flashmask
