// SPDX-License-Identifier: Apache-2.0

// Integers of dq by multiply-adds, and by cvt beside these: the nearest ones, under any scale, and rows that have none
// are marked. Two that are summed up as one number.

#include "backends/cuda/fragments/fixed_point.cuh"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

namespace flashmask::test {
namespace {

constexpr float kMost = 0x1p29F;  // largest |part * scale|

constexpr int kParts = 8;  ///< parts of a thread, two of either row in turn

enum class Way { kAdds, kTwoPipes };

/// The integers of a thread's parts, all with this scale, and the rows that are marked.
struct Rounded {
  int32_t integers[kParts];
  bool marked[2] = {};

  Rounded(Way way, const float (&parts)[kParts], float scale) {
    float dq[kParts];
    std::copy_n(parts, kParts, dq);
    const auto scale_of = [&](int) { return scale; };
    const auto mark = [&](int row) { marked[row] = true; };
    if (way == Way::kAdds) {
      cuda::make_integers_by_adds(dq, scale_of, mark);
    } else {
      cuda::make_integers_on_two_pipes(dq, scale_of, mark);
    }
    for (int i = 0; i < kParts; ++i) integers[i] = __float_as_int(dq[i]);
  }
};

class FixedPoint : public testing::TestWithParam<Way> {};
INSTANTIATE_TEST_SUITE_P(Ways, FixedPoint, testing::Values(Way::kAdds, Way::kTwoPipes));

TEST_P(FixedPoint, RoundsToTheNearest) {
  std::mt19937 random(7);
  std::uniform_real_distribution<float> mantissa(-1, 1), exponent(-30, 29);
  std::vector<float> values{0, 0.5F, -0.5F, 1.5F, 2.5F, 127.5F, 128, -128.5F, kMost, -kMost, kMost - 32};
  for (int i = 0; i < 200000; ++i) values.push_back(mantissa(random) * std::exp2(exponent(random)));
  for (const float scale : {1.F, 0x1p-98F, 0x1p80F, 0x1p126F}) {
    for (const float value : values) {
      const float part = value / scale;  // exact but for what is too small
      const Rounded rounded(GetParam(), {part, -part, 0, part, -part, part, part, 0}, scale);
      const auto nearest = static_cast<int32_t>(std::nearbyint(part * scale));
      const int32_t expected[kParts] = {nearest, -nearest, 0, nearest, -nearest, nearest, nearest, 0};
      ASSERT_TRUE(std::ranges::equal(rounded.integers, expected)) << value;
      ASSERT_FALSE(rounded.marked[0] || rounded.marked[1]) << value;
    }
  }
}

TEST_P(FixedPoint, MarksTheRowThatIsNotFinite) {
  for (const float scale : {1.F, 0x1p-98F, 0x1p126F}) {
    for (const float bad : {NAN, -NAN, INFINITY, -INFINITY}) {
      for (int at = 0; at < kParts; ++at) {
        float parts[kParts] = {kMost / scale, -kMost / scale, 1 / scale, 0, 0, 1 / scale, -1 / scale, kMost / scale};
        parts[at] = bad;
        const Rounded rounded(GetParam(), parts, scale);
        EXPECT_EQ(rounded.marked[0], at % 4 < 2) << bad << " at " << at;
        EXPECT_EQ(rounded.marked[1], at % 4 >= 2) << bad << " at " << at;
      }
    }
  }
}

TEST(JoinedIntegers, SumsAreThoseOfEither) {
  std::mt19937 random(8);
  std::uniform_int_distribution<int32_t> part(-(1 << 20), 1 << 20);
  for (int n = 0; n < 1000; ++n) {
    int32_t first = 0, second = 0;
    uint64_t joined = 0;
    for (int i = 0; i < 500; ++i) {
      const int32_t a = part(random), b = part(random);
      first += a, second += b;
      joined += static_cast<uint64_t>(a) + (static_cast<uint64_t>(b) << 32);
    }
    const float2 split = cuda::split_integers(joined);
    ASSERT_EQ(__float_as_int(split.x), first);
    ASSERT_EQ(__float_as_int(split.y), second);
  }
}

}  // namespace
}  // namespace flashmask::test
