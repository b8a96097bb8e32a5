// SPDX-License-Identifier: Apache-2.0
// The inline rules of mask/rules.h, each against counting on fingers.
#include "mask/rules.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <vector>

#include "common/random.h"
#include "mask/view.h"
#include "plan/single_columns.h"
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
        ASSERT_EQ(rules::clamp_row_on_diagonal(key, diagonal, seqlen),
                  rules::clamp_row(int64_t{key} - diagonal, seqlen))
            << key << " " << diagonal << " " << seqlen;
      }
    }
  }
}

TEST(Rules, PositionsThatARowSees) {
  const std::vector<int32_t> ends{INT32_MIN, INT32_MIN + 1, INT32_MIN + 2, -70000,        -2,       -1, 0, 1,
                                  2,         70000,         INT32_MAX - 2, INT32_MAX - 1, INT32_MAX};
  const auto difference = [](int32_t k_pos, int32_t q_pos) { return int64_t{k_pos} - q_pos; };
  for (const int32_t lo : ends) {
    for (const int32_t hi : ends) {
      // As a mask has them: edges that are not unbounded are within reach of a difference in 32 bits.
      if (lo == INT32_MIN + 1 || hi == INT32_MIN) continue;
      const rules::PositionBand band{lo, hi};
      for (const int32_t q_pos : ends) {
        const rules::SeenPositions seen = rules::seen_positions(band, q_pos);
        for (const int32_t k_pos : ends) {
          const bool expected = (lo == INT32_MIN || difference(k_pos, q_pos) >= lo) &&
                                (hi == INT32_MAX || difference(k_pos, q_pos) <= hi);
          ASSERT_EQ(rules::in_band(band, q_pos, k_pos), expected) << lo << " " << hi << " " << q_pos << " " << k_pos;
          ASSERT_EQ(seen.first <= k_pos && k_pos <= seen.last, expected)
              << lo << " " << hi << " " << q_pos << " " << k_pos;
        }
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
            ASSERT_EQ(rules::is_visible(column, i, j), expected)
                << seqlen << " [" << lo << ", " << hi << "] " << i << " " << j;
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
        const uint64_t bits = test::visible_bits(hidden, static_cast<int32_t>(row0));
        for (int64_t r = 0; r < 64 && row0 + r < rows; ++r)
          ASSERT_EQ(bits >> r & 1, at(row0 + r, j) ? 1u : 0u) << row0 << " + " << r;
        ASSERT_EQ(test::visible_bits<uint32_t>(hidden, static_cast<int32_t>(row0)), static_cast<uint32_t>(bits));
      }
    }
  }
}

/// Compares visible_windows with visible_bits in the columns first + at[i], for every row below seqlen_q of its two
/// windows.
template <int n, int tile_keys = 512>
bool windows_agree(const rules::Columns& m, int32_t first, const int32_t (&at)[n], int32_t row0) {
  uint32_t bits[2][n];
  rules::visible_windows<tile_keys>(m, test::StoredBounds<n>{m, first, at}, first, at, row0, bits);
  const auto rows = rules::low_bits<uint64_t>(m.seqlen_q - row0);
  uint64_t wrong = 0;
  for (int i = 0; i < n; ++i) {
    const uint64_t both = bits[0][i] | static_cast<uint64_t>(bits[1][i]) << 32;
    wrong |= (both ^ test::visible_bits(rules::hidden_rows(m, first + at[i]), row0)) & rows;
  }
  return wrong == 0;
}

/// Compares one column, two and four from first + at on: adjacent, eight apart as a warp takes them, and in any order.
bool windows_agree_in_every_number(const rules::Columns& m, int32_t first, int32_t at, int32_t row0) {
  return windows_agree<1>(m, first, {at}, row0) && windows_agree<2>(m, first, {at, at + 1}, row0) &&
         windows_agree<2>(m, first, {at + 8, at}, row0) &&
         windows_agree<4>(m, first, {at, at + 1, at + 2, at + 3}, row0) &&
         windows_agree<4>(m, first, {at + 9, at, at, at + 8}, row0);
}

/// The four vectors of a mask, `stride` elements from one column to the next. What lies between and around the columns
/// is made to be noticed.
class WindowVectors {
 public:
  /// `value(column, vector)` of each column, vectors in the order lts, lte, uts, ute.
  template <typename Value>
  WindowVectors(int64_t columns, int64_t stride, const Value& value) : stride_(stride) {
    for (std::size_t v = 0; v < 4; ++v) {
      data_[v].assign(static_cast<std::size_t>((columns + 2 * kMargin) * stride), 1);
      for (int64_t c = 0; c < columns; ++c)
        data_[v][static_cast<std::size_t>((c + kMargin) * stride)] = value(c, static_cast<int>(v));
    }
  }

  /// Such that key `key` is column `column`; bit v of `present` says whether vector v is there.
  rules::Columns with(int32_t seqlen_q, Interval band, int present, int64_t column, int32_t key) const {
    const auto vector = [&](std::size_t v) {
      return present >> v & 1 ? data_[v].data() + (column - key + kMargin) * stride_ : nullptr;
    };
    return {seqlen_q, band.begin, band.end, vector(0), vector(1), vector(2), vector(3), stride_};
  }

 private:
  static constexpr int64_t kMargin = 400;  ///< the largest key that `with` takes
  int64_t stride_;
  std::vector<int32_t> data_[4];
};

TEST(VisibleWindows, EveryTwoSmallIntervalsWithEveryVectorAbsent) {
  // Each column is one choice of four values, so that all choices meet, with columns of other choices beside them.
  for (const int32_t seqlen : {1, 2, 3}) {
    std::vector<int32_t> values{INT32_MIN, -1, INT32_MAX};
    for (int32_t row = 0; row <= seqlen + 1; ++row) values.push_back(row);
    const auto count = static_cast<int64_t>(values.size()), choices = count * count * count * count;
    const auto value = [&](int64_t c, int v) {
      for (; v > 0; --v) c /= count;
      return values[static_cast<std::size_t>(c % count)];
    };
    for (const int64_t apart : {1, 2, 4, 7}) {
      const WindowVectors vectors(choices, apart, value);
      for (int present = 0; present < 16; ++present) {
        for (const Interval band : {Interval{INT32_MIN, INT32_MAX}, {INT32_MIN, 0}, {-1, 1}}) {
          for (int64_t c = 0; c + 10 <= choices; c += stride()) {
            const auto key = static_cast<int32_t>(c % 3), row0 = static_cast<int32_t>(c % seqlen);
            ASSERT_TRUE(windows_agree_in_every_number(vectors.with(seqlen, band, present, c, key), key, 0, row0))
                << "seqlen_q " << seqlen << ", choice " << c << ", present " << present << ", stride " << apart
                << ", band [" << band.begin << ", " << band.end << "], row0 " << row0;
          }
        }
      }
    }
  }
}

TEST(VisibleWindows, EverySmallBand) {
  Random random(2);
  for (const int32_t seqlen : {1, 2, 5, 31, 32, 33, 36, 65}) {
    const WindowVectors vectors(24, 3,
                                [&](int64_t, int) { return static_cast<int32_t>(random.integer(-3, seqlen + 3)); });
    std::vector<int32_t> edges{INT32_MIN, INT32_MIN + 1, INT32_MAX - 1, INT32_MAX};
    for (int32_t edge = -seqlen - 1; edge <= 8; ++edge) edges.push_back(edge);
    for (std::size_t n = 0; n < edges.size() * edges.size(); n += static_cast<std::size_t>(stride())) {
      const Interval band{edges[n / edges.size()], edges[n % edges.size()]};
      for (const int present : {0, 1, 9, 15}) {
        for (int32_t key = 0; key < 7; ++key) {
          for (int32_t row0 = 0; row0 < seqlen; row0 += std::max(1, seqlen / 5)) {
            ASSERT_TRUE(windows_agree_in_every_number(vectors.with(seqlen, band, present, key, key), key / 2,
                                                      key - key / 2, row0))
                << "seqlen_q " << seqlen << ", band [" << band.begin << ", " << band.end << "], key " << key
                << ", row0 " << row0;
          }
        }
      }
    }
  }
}

TEST(VisibleWindows, RandomOnes) {
  Random random(3);
  for (int64_t n = 0; n < scaled(20'000); ++n) {
    const auto seqlen = static_cast<int32_t>(random.integer(1, 300)),
               key = static_cast<int32_t>(random.integer(0, 400));
    const auto weird = [&](int64_t from, int64_t to) {
      const int32_t ends[] = {INT32_MIN,  INT32_MIN + 1, -1,       0, seqlen - 1, seqlen,
                              seqlen + 1, INT32_MAX - 1, INT32_MAX};
      return random.integer(0, 3) == 0 ? ends[random.integer(0, 8)] : static_cast<int32_t>(random.integer(from, to));
    };
    const WindowVectors vectors(10, random.integer(1, 9), [&](int64_t, int) { return weird(-20, seqlen + 20); });
    const Interval band{weird(-300, 400), weird(-300, 400)};
    const auto present = static_cast<int>(random.integer(0, 15)), first = static_cast<int32_t>(random.integer(0, key));
    for (int32_t row0 = static_cast<int32_t>(random.integer(0, 15)); row0 < seqlen; row0 += 16) {
      ASSERT_TRUE(windows_agree_in_every_number(vectors.with(seqlen, band, present, 0, key), first, key - first, row0))
          << "number " << n << ", row0 " << row0;
    }
  }
}

TEST(VisibleWindows, AtTheEndsOfInt32) {
  constexpr int32_t kMax = INT32_MAX;
  const int32_t ends[] = {INT32_MIN, -1, 0, 1, kMax - 33, kMax - 32, kMax - 31, kMax - 1, kMax};
  const WindowVectors vectors(std::size(ends) + 10, 1,
                              [&](int64_t c, int v) { return ends[(c * (2 * v + 1) + v) % 9]; });
  for (const int32_t lo : ends) {
    for (const int32_t hi : ends) {
      for (const int32_t row0 : {0, 1, kMax - 64, kMax - 33, kMax - 32, kMax - 31, kMax - 1}) {
        // The keys at the end of a sequence of this length have no vectors here.
        for (const int32_t at : {0, 1, kMax / 2, kMax - 12}) {
          const rules::Columns none{kMax, lo, hi, nullptr, nullptr, nullptr, nullptr};
          ASSERT_TRUE(windows_agree_in_every_number(none, at, 1, row0))
              << "[" << lo << ", " << hi << "] " << row0 << " " << at;
        }
        for (int present = 1; present < 16; ++present) {
          for (int32_t c = 0; c < 9; ++c) {
            ASSERT_TRUE(windows_agree_in_every_number(vectors.with(kMax, {lo, hi}, present, c, c), c, 0, row0))
                << "[" << lo << ", " << hi << "] " << row0 << ", present " << present << ", column " << c;
          }
        }
      }
    }
  }
}

TEST(Rules, WindowFrom) {
  EXPECT_EQ(rules::window_from(0, 0), ~0u);
  EXPECT_EQ(rules::window_from(3, 0), ~7u);
  EXPECT_EQ(rules::window_from(-5, 0), ~0u);
  EXPECT_EQ(rules::window_from(32, 0), 0u);
  EXPECT_EQ(rules::window_from(32, 1), ~0u);
  EXPECT_EQ(rules::window_from(63, 1), 1u << 31);
  EXPECT_EQ(rules::window_from(INT32_MAX, 1), 0u);
}

TEST(Rules, RowsToDiagonal) {
  EXPECT_EQ(rules::rows_to_diagonal(10, 3, 5), 2);
  EXPECT_EQ(rules::rows_to_diagonal(10, 3, 9), -2);
  EXPECT_EQ(rules::rows_to_diagonal(0, INT32_MAX, 0), -(1 << 30)) << "no row is hidden above";
  EXPECT_EQ(rules::rows_to_diagonal(INT32_MAX - 1, INT32_MIN, 0), 1 << 30) << "none below";
}

TEST(Rules, ColumnsInBand) {
  constexpr int32_t kMin = INT32_MIN, kMax = INT32_MAX;
  for (const Interval edges :
       {Interval{kMin, kMax}, {kMin, 0}, {-7, kMax}, {-9, 4}, {3, 2}, {kMin + 1, kMax - 1}, {-kMax + 9, 9 - kMax}}) {
    const rules::Columns m{kMax, edges.begin, edges.end, nullptr, nullptr, nullptr, nullptr};
    for (const int32_t first : {0, 16, kMax - 17}) {
      for (const int32_t row0 : {0, 5, 20, kMax - 40}) {
        const rules::TileBand band = rules::tile_band(m, first, row0);
        for (int32_t r = 0; r < 24; ++r) {
          const Interval seen = rules::columns_in_band(band, r);
          for (int32_t c = 0; c < 16; ++c) {
            ASSERT_EQ(seen.begin <= c && c < seen.end, rules::is_visible(m, row0 + r, first + c))
                << "[" << edges.begin << ", " << edges.end << "] row " << row0 << " + " << r << ", column " << first
                << " + " << c;
          }
        }
      }
    }
  }
}

TEST(VisibleWindows, InsideTheBandAndAroundItsEdges) {
  // Tiles of 16 keys: the shortcut for those inside the band begins and ends with the right tile.
  for (const Interval band : {Interval{INT32_MIN, 0}, {-200, INT32_MAX}, {-300, -20}, {40, 90}}) {
    const rules::Columns m{1000, band.begin, band.end, nullptr, nullptr, nullptr, nullptr, 1};
    for (int32_t first = 0; first < 1000; first += 7) {
      for (int32_t row0 = 0; row0 < 1000; row0 += 13)
        ASSERT_TRUE((windows_agree<4, 16>(m, first, {0, 15, 7, 8}, row0))) << first << ", " << row0;
    }
  }
}

TEST(Rules, BitsAtTheEndOfTheLongestSequence) {
  const int32_t last = INT32_MAX - 64;
  rules::HiddenRows hidden{{{0, 0}, {INT32_MAX - 1, INT32_MAX}, {last, last + 1}, {0, 3}}};
  EXPECT_EQ(test::visible_bits(hidden, last), ~uint64_t{0} & ~(uint64_t{1} << 63) & ~uint64_t{1});
  EXPECT_EQ(test::visible_bits(hidden, 0), ~uint64_t{7});
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
          int same = 0;  // nonempty slots of the four that agree, in order
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
          const Interval covered = rules::covered_tiles({begin, end}, tile, seqlen),
                         touched = rules::touched_tiles({begin, end}, tile);
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
  // own == all: its own; one: for all; a divisor: groups of neighbours.
  EXPECT_EQ(broadcast_index(3, 4, 4), 3);
  EXPECT_EQ(broadcast_index(3, 4, 1), 0);
  EXPECT_EQ(broadcast_index(0, 6, 2), 0);
  EXPECT_EQ(broadcast_index(2, 6, 2), 0);
  EXPECT_EQ(broadcast_index(3, 6, 2), 1);
}

}  // namespace
}  // namespace flashmask::test
