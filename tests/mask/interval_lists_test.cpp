// SPDX-License-Identifier: Apache-2.0
// Masks of any number of hidden intervals per column: what they hide, their tiles and the algebra, against the rule of
// the tests, element by element.
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "flashmask/builders.h"
#include "flashmask/inspect.h"
#include "flashmask/mask.h"
#include "flashmask/plan.h"
#include "flashmask/tiles.h"
#include "support/brute_force.h"
#include "support/expect_error.h"
#include "support/extent.h"
#include "support/independent_rule.h"
#include "support/random_masks.h"

namespace flashmask::test {
namespace {

MaskParts random_lists(Random& random, int64_t most_rows, int64_t most_keys) {
  MaskParts parts = random_parts(random, ColumnKind::kLists, random.integer(1, most_rows), random.integer(1, most_keys),
                                 random.integer(1, 2), random.integer(1, 2));
  if (random.integer(0, 3) == 0) draw_block_mask(random, 1, 2, parts);
  if (random.integer(0, 3) == 0) draw_positions(random, random.flip() ? 1 : parts.batch, parts);
  return parts;
}

/// Element (i, j) of batch entry b and head h, of a dense matrix of a mask.
uint8_t element(const std::vector<uint8_t>& dense, const Mask& mask, int64_t b, int64_t h, int64_t i, int64_t j) {
  const int64_t matrix = b * mask.heads() + h;
  return dense[static_cast<std::size_t>((matrix * mask.seqlen_q() + i) * mask.seqlen_k() + j)];
}

TEST(IntervalLists, HideWhatTheRuleHides) {
  Random random(1);
  int64_t lists = 0;
  for (int64_t n = 0; n < scaled(1000); ++n) {
    const MaskParts parts = random_lists(random, 200, 20);
    const Mask mask(parts);
    lists += mask.has_interval_lists();
    const std::vector<uint8_t> expected = dense_by_rule(parts);
    ASSERT_TRUE(to_dense(mask) == expected) << n;
    ASSERT_TRUE(dense_by_rule(parts_of(mask)) == expected) << n << ": as stored";
    for (int64_t times = 0; times < 50; ++times) {
      const int64_t b = random.integer(0, mask.batch() - 1), h = random.integer(0, mask.heads() - 1),
                    i = random.integer(0, mask.seqlen_q() - 1), j = random.integer(0, mask.seqlen_k() - 1);
      ASSERT_EQ(mask.visible(b, h, i, j), element(expected, mask, b, h, i, j) != 0) << n;
    }
    const Mask causal = mask.has_positions() ? mask : mask.with_band(Band::causal()).with_q_offset(1);
    MaskParts changed = parts;
    if (!mask.has_positions()) changed.band = Band::causal(), changed.q_offset = 1;
    ASSERT_TRUE(to_dense(causal) == dense_by_rule(changed)) << n << ": with another band";
  }
  EXPECT_GT(lists, 0);
}

TEST(IntervalLists, AreNormalised) {
  const Mask mask({.seqlen_q = 10,
                   .seqlen_k = 2,
                   .column_ptr = {0, 6, 7},
                   .intervals = {8, 99, 2, 3, -5, 1, 4, 4, 3, 5, 6, 7, 9, 2}});
  EXPECT_TRUE(std::ranges::equal(mask.column_ptr(), std::vector<int32_t>{0, 4, 4}));
  EXPECT_TRUE(std::ranges::equal(mask.intervals(), std::vector<int32_t>{0, 1, 2, 5, 6, 7, 8, 10}));
  EXPECT_EQ(mask.num_intervals(), 4);
  EXPECT_EQ(mask.memory_bytes(), (3 + 8) * 4);
  EXPECT_TRUE(mask.lts().empty() && mask.ute().empty());
  EXPECT_TRUE(mask.validate().empty());
}

TEST(IntervalLists, ThatFitTwoBecomeVectors) {
  const Mask mask({.seqlen_q = 10,
                   .seqlen_k = 2,
                   .heads = 2,
                   .column_ptr = {0, 3, 4, 4, 4, 6},
                   .intervals = {2, 4, 4, 6, 8, 9, 0, 3, 5, 10, 1, 2}});
  EXPECT_FALSE(mask.has_interval_lists());
  EXPECT_EQ(mask.num_intervals(), 2);
  EXPECT_EQ(mask.heads(), 2);
  // Batch entries and heads stay where nothing is hidden.
  const Mask nothing({.seqlen_q = 4, .seqlen_k = 1, .batch = 2, .heads = 3, .column_ptr = std::vector<int32_t>(12)});
  EXPECT_EQ(nothing.batch(), 2);
  EXPECT_EQ(nothing.heads(), 3);
  EXPECT_EQ(to_dense(nothing), std::vector<uint8_t>(24, 1));
}

TEST(IntervalLists, TheHashSaysWhatTheyHide) {
  const MaskParts parts{.seqlen_q = 9, .seqlen_k = 2, .column_ptr = {0, 3, 3}, .intervals = {1, 2, 3, 4, 5, 6}};
  const auto hash = [](MaskParts p) { return Mask(std::move(p)).view().content_hash; };
  MaskParts shuffled = parts, moved = parts, other = parts;
  shuffled.intervals = {5, 6, 1, 2, 3, 4};
  moved.column_ptr = {0, 0, 3};
  other.intervals[5] = 7;
  EXPECT_EQ(hash(parts), hash(shuffled));
  EXPECT_NE(hash(parts), hash(moved));
  EXPECT_NE(hash(parts), hash(other));
  const Plan plan{Mask(parts)};
  EXPECT_EQ(plan.view().mask_hash(), hash(shuffled));
}

TEST(IntervalLists, ClassesAndCountsOfTilesAreExact) {
  Random random(2);
  for (int64_t n = 0; n < scaled(300); ++n) {
    MaskParts parts = random_lists(random, 300, 300);
    parts.q_pos.clear(), parts.k_pos.clear();
    const Mask mask(parts);
    const std::vector<uint8_t> expected = dense_by_rule(parts);
    const TileShape shapes[] = {{128, 128}, {64, 128}, {7, 5}};
    const TileShape shape = shapes[n % 3];
    int64_t full = 0, partial = 0;
    for (int64_t m = 0; m < mask.batch() * mask.heads(); ++m) {
      const Dense dense = matrix(expected, m, mask.seqlen_q(), mask.seqlen_k());
      const auto classes = classes_of(dense, shape);
      ASSERT_EQ(classify_tiles(mask, m / mask.heads(), m % mask.heads(), shape).classes, classes) << n;
      full += std::ranges::count(classes, TileClass::kFull);
      partial += std::ranges::count(classes, TileClass::kPartial);
    }
    const MaskStatistics sums = statistics(mask, shape);
    EXPECT_EQ(sums.visible, std::ranges::count(expected, uint8_t{1})) << n;
    EXPECT_EQ(sums.full_tiles, full) << n;
    EXPECT_EQ(sums.partial_tiles, partial) << n;
    const Plan plan(mask);
    for (int64_t m = 0; m < mask.batch() * mask.heads(); ++m) {
      const auto granules = classes_of(matrix(expected, m, mask.seqlen_q(), mask.seqlen_k()), {64, 128});
      const int64_t keys = (mask.seqlen_k() + 127) / 128;
      for (std::size_t at = 0; at < granules.size(); ++at) {
        const auto cell = static_cast<int64_t>(at);
        ASSERT_EQ(plan.view().granule(m, cell / keys, cell % keys), granules[at]) << n;
      }
    }
    if (HasFailure()) return;
  }
}

TEST(IntervalLists, ThePlanKnowsTheLastVisibleRowAndKey) {
  Random random(3);
  for (int64_t n = 0; n < scaled(200); ++n) {
    MaskParts parts = random_lists(random, 200, 200);
    parts.batch = parts.heads = 1;
    parts.column_ptr.clear(), parts.intervals.clear();
    draw_lists(random, parts);
    const Mask mask(parts);
    const std::vector<uint8_t> expected = dense_by_rule(parts);
    const Plan plan(mask);
    for (int64_t b = 0; b < mask.batch(); ++b) {
      int32_t rows = 0, keys = 0;
      for (int64_t h = 0; h < mask.heads(); ++h) {
        for (int64_t i = 0; i < mask.seqlen_q(); ++i) {
          for (int64_t j = 0; j < mask.seqlen_k(); ++j) {
            if (!element(expected, mask, b, h, i, j)) continue;
            rows = std::max(rows, static_cast<int32_t>(i + 1));
            keys = std::max(keys, static_cast<int32_t>(j + 1));
          }
        }
      }
      const VisibleExtent extent = plan.view().extent(b);
      ASSERT_EQ(extent.rows, rows) << n;
      ASSERT_EQ(extent.keys, keys) << n;
    }
  }
}

TEST(IntervalLists, CropAndGatherTakeTheElements) {
  Random random(4);
  for (int64_t n = 0; n < scaled(600); ++n) {
    MaskParts parts = random_lists(random, 30, 20);
    parts.block_mask.clear();
    const Mask mask(parts);
    const std::vector<uint8_t> expected = dense_by_rule(parts);
    std::vector<RowSegment> rows, keys;
    for (int64_t at = 0; at < mask.seqlen_q();) {
      const int64_t begin = random.integer(at, mask.seqlen_q()), end = random.integer(begin, mask.seqlen_q());
      rows.push_back({begin, end});
      at = end + 1;
    }
    for (int64_t times = random.integer(0, 3); times > 0; --times) {
      const int64_t begin = random.integer(0, mask.seqlen_k());
      keys.push_back({begin, random.integer(begin, mask.seqlen_k())});
    }
    const Mask part = gather(mask, rows, keys);
    ASSERT_EQ(mask.batch() % part.batch(), 0);
    int64_t row = 0;
    for (const RowSegment& of_rows : rows) {
      for (int64_t i = of_rows.begin; i < of_rows.end; ++i, ++row) {
        int64_t key = 0;
        for (const RowSegment& of_keys : keys) {
          for (int64_t j = of_keys.begin; j < of_keys.end; ++j, ++key) {
            for (int64_t m = 0; m < mask.batch() * mask.heads(); ++m) {
              const int64_t b = m / mask.heads(), h = m % mask.heads();
              ASSERT_EQ(part.visible(std::min(b, part.batch() - 1), std::min(h, part.heads() - 1), row, key),
                        element(expected, mask, b, h, i, j) != 0)
                  << n;
            }
          }
        }
      }
    }
    ASSERT_EQ(part.seqlen_q(), row);
  }
}

TEST(IntervalLists, IntersectAndConcatenateAreExact) {
  Random random(5);
  for (int64_t n = 0; n < scaled(300); ++n) {
    MaskParts a = random_lists(random, 30, 20);
    a.block_mask.clear();
    MaskParts b = random_parts(random, n % 2 ? ColumnKind::kLists : random_kind(random), a.seqlen_q, a.seqlen_k,
                               a.batch, a.heads);
    const Mask x(a), y(b), both = intersect(x, y);
    const std::vector<Mask> pieces{x, y};
    const Mask packed = concatenate(pieces);
    for (int64_t m = 0; m < a.batch * a.heads; ++m) {
      const int64_t e = m / a.heads, h = m % a.heads;
      const auto sees = [&](const Mask& mask, int64_t i, int64_t j) {
        return mask.visible(std::min(e, mask.batch() - 1), std::min(h, mask.heads() - 1), i, j);
      };
      for (int64_t i = 0; i < packed.seqlen_q(); ++i) {
        for (int64_t j = 0; j < packed.seqlen_k(); ++j) {
          const bool first = i < a.seqlen_q && j < a.seqlen_k, second = i >= a.seqlen_q && j >= a.seqlen_k;
          const bool expected = first ? sees(x, i, j) : second && sees(y, i - a.seqlen_q, j - a.seqlen_k);
          ASSERT_EQ(sees(packed, i, j), expected) << n;
          if (!first) continue;
          ASSERT_EQ(sees(both, i, j), sees(x, i, j) && sees(y, i, j)) << n;
        }
      }
    }
  }
}

TEST(IntervalLists, AreReadFromTensors) {
  Random random(11);
  MaskParts parts;
  do {
    parts = random_parts(random, ColumnKind::kLists, 50, 40, 2, 2);
  } while (!Mask(parts).has_interval_lists());
  parts.band = Band::none();
  parts.q_offset.reset();
  const Mask expected(parts);
  // Every second element of wider rows.
  std::vector<int32_t> wide;
  for (const int32_t row : parts.intervals) wide.insert(wide.end(), {row, -1});
  const auto count = static_cast<int64_t>(parts.intervals.size() / 2);
  TensorView ptr = TensorView::contiguous(parts.column_ptr.data(), DataType::kInt32, {2, 2, 41}),
             intervals = TensorView::contiguous(wide.data(), DataType::kInt32, {count, 2});
  intervals.stride[0] = 4;
  intervals.stride[1] = 2;
  const Mask mask = from_interval_lists(ptr, intervals, 50);
  EXPECT_EQ(mask.view().content_hash, expected.view().content_hash);
  EXPECT_TRUE(std::ranges::equal(mask.intervals(), expected.intervals()));
  // A device's are borrowed as they are.
  const Device device{Device::Kind::kCuda, 1};
  ptr.device = device;
  expect_invalid({"column_ptr is on CUDA device 1 and intervals on the CPU"},
                 [&] { from_interval_lists(ptr, intervals, 50); });
  intervals.device = device;
  expect_invalid({"intervals is on CUDA device 1 and not contiguous"},
                 [&] { from_interval_lists(ptr, intervals, 50); });
  intervals = TensorView::contiguous(parts.intervals.data(), DataType::kInt32, {count, 2});
  intervals.device = device;
  const Mask borrowed = from_interval_lists(ptr, intervals, 50).with_band(Band::causal());
  EXPECT_EQ(borrowed.view().intervals, parts.intervals.data());
  EXPECT_EQ(borrowed.view().listed_intervals, count);
  EXPECT_EQ(borrowed.device(), device);
  EXPECT_TRUE(borrowed.has_interval_lists());
  TensorView misaligned = intervals;
  misaligned.data = static_cast<int32_t*>(intervals.data) + 1;
  expect_invalid({"intervals is on CUDA device 1 and not aligned to 8 bytes"},
                 [&] { from_interval_lists(ptr, misaligned, 50); });
  expect_invalid({"Mask::column_ptr", "CUDA device 1"}, [&] { borrowed.column_ptr(); });
  expect_invalid({"Mask::num_intervals", "CUDA device 1"}, [&] { borrowed.num_intervals(); });
  expect_invalid({"column_ptr is float32"}, [&] {
    from_interval_lists(TensorView::contiguous(nullptr, DataType::kFloat32, {1, 1, 2}), intervals, 50);
  });
  expect_invalid({"column_ptr is", "[batch, heads, seqlen_k + 1]"}, [&] { from_interval_lists({}, intervals, 50); });
}

TEST(IntervalLists, WrongOnesAreRefused) {
  const auto refused = [](const MaskParts& parts, std::initializer_list<std::string> words) {
    expect_invalid(words, [&] { Mask{parts}; });
  };
  refused({.seqlen_q = 4, .seqlen_k = 2, .lts = {1, 1}, .column_ptr = {0, 0, 0}},
          {"column_ptr takes the place of lts"});
  refused({.seqlen_q = 4, .seqlen_k = 2, .intervals = {0, 1}}, {"intervals has 2 elements and column_ptr none"});
  refused({.seqlen_q = 4, .seqlen_k = 2, .column_ptr = {0, 0}},
          {"column_ptr has 2 elements", "[batch, heads, seqlen_k + 1] needs 3"});
  refused({.seqlen_q = 4, .seqlen_k = 1, .column_ptr = {0, 1}, .intervals = {0, 1, 2}}, {"intervals has 3", "[n, 2]"});
  const std::vector<int32_t> wrong[] = {{0, 2, 1}, {0, 1, 3}, {-1, 0, 0}};
  const char* const words[] = {"column 1) is 2 and the next one 1", "column 1) is 1 and the next one 3",
                               "column 0) is -1"};
  for (std::size_t n = 0; n < 3; ++n)
    refused({.seqlen_q = 4, .seqlen_k = 2, .column_ptr = wrong[n], .intervals = {0, 1, 2, 3}},
            {words[n], "ascend within [0, 2]"});
  const Mask lists({.seqlen_q = 9, .seqlen_k = 1, .column_ptr = {0, 3}, .intervals = {1, 2, 3, 4, 5, 6}});
  expect_error(ErrorCode::kUnrepresentable, {"the mask without a band", "column 0) needs 3"},
               [&] { to_startend_row_indices(lists); });
}

}  // namespace
}  // namespace flashmask::test
