// SPDX-License-Identifier: Apache-2.0
// The inline rules of mask/rules.h, each against counting on fingers.
#include "mask/rules.h"

#include <gtest/gtest.h>

#include <vector>

#include "common/random.h"
#include "mask/view.h"
#include "support/extent.h"
#include "support/independent_rule.h"
#include "support/random_masks.h"

namespace flashmask::test {
namespace {

using rules::Interval;

TEST(Rules, ClampRow) {
  EXPECT_EQ(rules::clamp_row(-1, 5), 0);
  EXPECT_EQ(rules::clamp_row(INT64_MIN, 5), 0);
  EXPECT_EQ(rules::clamp_row(0, 5), 0);
  EXPECT_EQ(rules::clamp_row(5, 5), 5);
  EXPECT_EQ(rules::clamp_row(6, 5), 5);
  EXPECT_EQ(rules::clamp_row(INT64_MAX, INT32_MAX), INT32_MAX);
  EXPECT_EQ(rules::clamp_row(3, 0), 0);
}

TEST(Rules, LowBits) {
  EXPECT_EQ(rules::low_bits(0), 0u);
  EXPECT_EQ(rules::low_bits(1), 1u);
  EXPECT_EQ(rules::low_bits(63), ~uint64_t{0} >> 1);
  EXPECT_EQ(rules::low_bits(64), ~uint64_t{0});
  EXPECT_EQ(rules::low_bits(1000), ~uint64_t{0});
}

TEST(Rules, LowBitsOfAShortWord) {
  EXPECT_EQ(rules::low_bits<uint32_t>(0), 0u);
  EXPECT_EQ(rules::low_bits<uint32_t>(31), ~uint32_t{0} >> 1);
  EXPECT_EQ(rules::low_bits<uint32_t>(32), ~uint32_t{0});
  EXPECT_EQ(rules::low_bits<uint32_t>(INT32_MAX), ~uint32_t{0});
}

TEST(Rules, ClampRowOnDiagonal) {
  const int32_t ends[] = {INT32_MIN, INT32_MIN + 1, -1000, -1, 0, 1, 1000, INT32_MAX - 1, INT32_MAX};
  for (const int32_t key : {0, 1, 500, INT32_MAX - 1, INT32_MAX}) {
    for (const int32_t diagonal : ends) {
      for (const int32_t seqlen : {0, 1, 700, INT32_MAX}) {
        ASSERT_EQ(rules::clamp_row_on_diagonal(key, diagonal, seqlen), rules::clamp_row(int64_t{key} - diagonal, seqlen))
            << key << " " << diagonal << " " << seqlen;
      }
    }
  }
}

TEST(Rules, BandsAtTheEndsOfInt32) {
  // Against 64-bit arithmetic: row i of column j is hidden if j - i is outside of [lo, hi].
  constexpr int32_t kMin = INT32_MIN, kMax = INT32_MAX;
  for (const int32_t seqlen : {1, 100, kMax}) {
    for (const int32_t lo : {kMin, kMin + 1, -kMax + 100, -101, -1, 0, 1, 101, kMax - 1, kMax}) {
      for (const int32_t hi : {kMin, kMin + 1, -kMax + 100, -101, -1, 0, 1, 101, kMax - 1, kMax}) {
        const rules::Columns column{seqlen, lo, hi, nullptr, nullptr, nullptr, nullptr};
        for (const int32_t j : {0, 1, 99, kMax / 2, kMax - 101, kMax - 1}) {
          for (const int32_t i : {0, 1, 50, 98, 99, kMax - 101, kMax - 2, kMax - 1}) {
            if (i >= seqlen) continue;
            const int64_t distance = int64_t{j} - i;
            const bool expected = (lo == kMin || distance >= lo) && (hi == kMax || distance <= hi);
            ASSERT_EQ(rules::is_visible(column, i, j), expected) << seqlen << " [" << lo << ", " << hi << "] " << i << " " << j;
          }
        }
      }
    }
  }
}

TEST(Rules, StoredInterval) {
  const int32_t begin[] = {-5, 7, 2}, end[] = {3, INT32_MAX, INT32_MIN};
  const auto is = [](Interval x, int32_t b, int32_t e) { return x.begin == b && x.end == e; };
  EXPECT_TRUE(is(rules::stored_interval(begin, end, 0, 6), 0, 3));
  EXPECT_TRUE(is(rules::stored_interval(begin, end, 1, 6), 6, 6));
  EXPECT_TRUE(is(rules::stored_interval(begin, end, 2, 6), 2, 0)) << "reversed stays reversed: empty";
  EXPECT_TRUE(is(rules::stored_interval(begin, nullptr, 2, 6), 2, 6));
  EXPECT_TRUE(is(rules::stored_interval(nullptr, end, 0, 6), 0, 3));
  const Interval none = rules::stored_interval(nullptr, nullptr, 0, 6);
  EXPECT_GE(none.begin, none.end);
}

TEST(Rules, VisibilityAndBits) {
  Random random(1);
  for (int64_t n = 0; n < scaled(1500); ++n) {
    const int64_t rows = random.integer(1, 300), keys = random.integer(1, 12);
    const MaskParts parts = random_parts(random, random_kind(random), rows, keys);
    const Mask mask(parts);
    const auto expected = dense_by_rule(parts);
    const rules::Columns column = columns(mask.view(), 0, 0);
    const auto at = [&](int64_t i, int64_t j) { return expected[static_cast<std::size_t>(i * keys + j)] != 0; };
    for (int32_t j = 0; j < keys; ++j) {
      const rules::HiddenRows hidden = rules::hidden_rows(column, j);
      for (int32_t i = 0; i < rows; ++i) {
        ASSERT_EQ(rules::is_visible(hidden, i), at(i, j));
        ASSERT_EQ(rules::is_visible(column, i, j), at(i, j));
      }
      for (const auto row0 : {int64_t{0}, random.integer(0, rows - 1), rows - 1}) {
        const uint64_t bits = rules::visible_bits(hidden, static_cast<int32_t>(row0));
        for (int64_t r = 0; r < 64 && row0 + r < rows; ++r) ASSERT_EQ(bits >> r & 1, at(row0 + r, j) ? 1u : 0u) << row0 << " + " << r;
        ASSERT_EQ(rules::visible_bits32(hidden, static_cast<int32_t>(row0)), static_cast<uint32_t>(bits));
      }
    }
  }
}

TEST(Rules, BitsAtTheEndOfTheLongestSequence) {
  const int32_t last = INT32_MAX - 64;
  rules::HiddenRows hidden{{{0, 0}, {INT32_MAX - 1, INT32_MAX}, {last, last + 1}, {0, 3}}};
  EXPECT_EQ(rules::visible_bits(hidden, last), ~uint64_t{0} & ~(uint64_t{1} << 63) & ~uint64_t{1});
  EXPECT_EQ(rules::visible_bits(hidden, 0), ~uint64_t{7});
}

TEST(Rules, MergeOfEveryFourSmallIntervals) {
  // All quadruples of the intervals within [0, 4), empty and reversed ones included: 25^4 of them.
  std::vector<Interval> all;
  for (int32_t b = 0; b <= 4; ++b) {
    for (int32_t e = 0; e <= 4; ++e) all.push_back({b, e});
  }
  const auto rows_of = [](Interval x) { return x.begin < x.end ? ((1u << x.end) - 1) & ~((1u << x.begin) - 1) : 0u; };
  for (std::size_t a = 0; a < all.size(); ++a) {
    for (std::size_t b = 0; b < all.size(); ++b) {
      for (std::size_t c = 0; c < all.size(); ++c) {
        for (std::size_t d = 0; d < all.size(); ++d) {
          const rules::HiddenRows hidden{{all[a], all[b], all[c], all[d]}};
          const unsigned expected = rows_of(all[a]) | rows_of(all[b]) | rows_of(all[c]) | rows_of(all[d]);
          Interval merged[4];
          const int n = rules::merge(hidden, merged);
          unsigned got = 0;
          bool apart = true;  // ascending, not empty, and with a gap between them
          for (int k = 0; k < n; ++k) {
            got |= rows_of(merged[k]);
            apart &= merged[k].begin < merged[k].end && (k == 0 || merged[k - 1].end < merged[k].begin);
          }
          ASSERT_TRUE(got == expected && apart) << a << " " << b << " " << c << " " << d;
          const rules::HiddenRows four = rules::merge(hidden);
          int same = 0;  // of the four slots those that are not empty, in the same order
          for (const Interval& x : four.interval) {
            if (x.begin < x.end && same < n && merged[same].begin == x.begin && merged[same].end == x.end) ++same;
          }
          ASSERT_EQ(same, n);
        }
      }
    }
  }
}

TEST(Rules, CoveredAndTouchedTiles) {
  for (int32_t seqlen = 1; seqlen <= 14; ++seqlen) {
    for (int32_t tile = 1; tile <= 6; ++tile) {
      for (int32_t begin = 0; begin < seqlen; ++begin) {
        for (int32_t end = begin + 1; end <= seqlen; ++end) {
          const Interval covered = rules::covered_tiles({begin, end}, tile, seqlen), touched = rules::touched_tiles({begin, end}, tile);
          for (int32_t t = 0; t * tile < seqlen; ++t) {
            const int32_t first = t * tile, past = std::min(first + tile, seqlen);
            ASSERT_EQ(t >= covered.begin && t < covered.end, begin <= first && past <= end)
                << seqlen << " " << tile << " [" << begin << ", " << end << ") tile " << t;
            ASSERT_EQ(t >= touched.begin && t < touched.end, begin < past && first < end)
                << seqlen << " " << tile << " [" << begin << ", " << end << ") tile " << t;
          }
        }
      }
    }
  }
  // No overflow at the largest lengths.
  const Interval all = rules::covered_tiles({0, INT32_MAX}, 64, INT32_MAX);
  EXPECT_EQ(all.begin, 0);
  EXPECT_EQ(all.end, INT32_MAX / 64 + 1);
  EXPECT_EQ(rules::touched_tiles({INT32_MAX - 1, INT32_MAX}, INT32_MAX).end, 1);
}

TEST(Rules, LiveAndFull) {
  EXPECT_FALSE(rules::is_live(3, 3));
  EXPECT_TRUE(rules::is_live(2, 3));
  EXPECT_TRUE(rules::is_full(0));
  EXPECT_FALSE(rules::is_full(1));
}

TEST(Rules, BroadcastIndex) {
  // own == all: its own; one: everybody's; a divisor: groups of neighbours.
  EXPECT_EQ(broadcast_index(3, 4, 4), 3);
  EXPECT_EQ(broadcast_index(3, 4, 1), 0);
  EXPECT_EQ(broadcast_index(0, 6, 2), 0);
  EXPECT_EQ(broadcast_index(2, 6, 2), 0);
  EXPECT_EQ(broadcast_index(3, 6, 2), 1);
}

}  // namespace
}  // namespace flashmask::test
