// SPDX-License-Identifier: Apache-2.0

// Integers of dq by multiply-adds: the nearest ones, under any scale, and rows that have none are marked.

#include "backends/cuda/fragments/fixed_point.cuh"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

namespace flashmask::test {
namespace {

constexpr float kMost = 0x1p29F;  // largest |part * scale|

/// The integers of a thread's two parts of either row, all four with this scale, and the rows that are marked.
struct Rounded {
  int32_t integers[4];
  bool marked[2] = {};

  Rounded(const float (&parts)[4], float scale) {
    float dq[] = {parts[0], parts[1], parts[2], parts[3]};
    cuda::make_integers_by_adds(dq, [&](int) { return scale; }, [&](int row) { marked[row] = true; });
    for (int i = 0; i < 4; ++i) integers[i] = __float_as_int(dq[i]);
  }
};

TEST(FixedPoint, RoundsToTheNearest) {
  std::mt19937 random(7);
  std::uniform_real_distribution<float> mantissa(-1, 1), exponent(-30, 29);
  std::vector<float> values{0, 0.5F, -0.5F, 1.5F, 2.5F, 127.5F, 128, -128.5F, kMost, -kMost, kMost - 32};
  for (int i = 0; i < 200000; ++i) values.push_back(mantissa(random) * std::exp2(exponent(random)));
  for (const float scale : {1.F, 0x1p-98F, 0x1p80F, 0x1p126F}) {
    for (const float value : values) {
      const float part = value / scale;  // exact but for what is too small
      const Rounded rounded({part, -part, 0, part}, scale);
      const auto nearest = static_cast<int32_t>(std::nearbyint(part * scale));
      ASSERT_EQ(rounded.integers[0], nearest) << value;
      ASSERT_EQ(rounded.integers[1], -nearest) << value;
      ASSERT_EQ(rounded.integers[3], nearest) << value;
      ASSERT_FALSE(rounded.marked[0] || rounded.marked[1]) << value;
    }
  }
}

TEST(FixedPoint, MarksTheRowThatIsNotFinite) {
  for (const float scale : {1.F, 0x1p-98F, 0x1p126F}) {
    for (const float bad : {NAN, -NAN, INFINITY, -INFINITY}) {
      for (int at = 0; at < 4; ++at) {
        float parts[] = {kMost / scale, -kMost / scale, 1 / scale, 0};
        parts[at] = bad;
        const Rounded rounded(parts, scale);
        EXPECT_EQ(rounded.marked[0], at < 2) << bad << " at " << at;
        EXPECT_EQ(rounded.marked[1], at >= 2) << bad << " at " << at;
      }
    }
  }
}

}  // namespace
}  // namespace flashmask::test
