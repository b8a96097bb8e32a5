// SPDX-License-Identifier: Apache-2.0
// Masks whose band compares positions, against the rule and against the same operations on dense matrices.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "flashmask/builders.h"
#include "flashmask/inspect.h"
#include "flashmask/mask.h"
#include "support/expect_error.h"
#include "support/extent.h"
#include "support/independent_rule.h"
#include "support/random_masks.h"

namespace flashmask::test {
namespace {

MaskParts random_positioned(Random& random, int64_t longest) {
  MaskParts parts = random_parts(random, random_kind(random), random.integer(1, longest), random.integer(1, longest),
                                 random.integer(1, 2), random.integer(1, 2));
  draw_positions(random, random.flip() ? 1 : parts.batch, parts);
  if (random.integer(0, 3) == 0) draw_block_mask(random, 1, parts.heads, parts);
  return parts;
}

TEST(Positions, RandomOnesFollowTheRule) {
  Random random(1);
  for (int64_t n = 0; n < scaled(400); ++n) {
    const MaskParts parts = random_positioned(random, 150);
    const Mask mask(parts);
    const auto dense = dense_by_rule(parts);
    ASSERT_TRUE(to_dense(mask) == dense) << n;
    for (int64_t k = 0; k < 50; ++k) {
      const int64_t b = random.integer(0, mask.batch() - 1), h = random.integer(0, mask.heads() - 1),
                    i = random.integer(0, parts.seqlen_q - 1), j = random.integer(0, parts.seqlen_k - 1);
      ASSERT_EQ(
          mask.visible(b, h, i, j),
          dense[static_cast<std::size_t>(((b * mask.heads() + h) * parts.seqlen_q + i) * parts.seqlen_k + j)] != 0)
          << n;
    }
    ASSERT_EQ(statistics(mask, {16, 24}).visible, std::count(dense.begin(), dense.end(), 1)) << n;
  }
}

TEST(Positions, ThoseOfTheIndicesAreTheMaskWithoutThem) {
  Random random(2);
  for (int64_t n = 0; n < scaled(100); ++n) {
    MaskParts parts = random_parts(random, random_kind(random), random.integer(1, 80), random.integer(1, 80));
    const auto expected = dense_by_rule(parts);
    const int64_t offset = parts.q_offset.value_or(parts.seqlen_k - parts.seqlen_q);
    parts.q_offset.reset();
    for (int64_t i = 0; i < parts.seqlen_q; ++i) parts.q_pos.push_back(static_cast<int32_t>(i + offset));
    for (int64_t j = 0; j < parts.seqlen_k; ++j) parts.k_pos.push_back(static_cast<int32_t>(j));
    ASSERT_TRUE(to_dense(Mask(parts)) == expected) << n;
  }
}

TEST(Positions, TensorsOfAnyStridesAndBatch) {
  // Rows of two batch entries in reverse, keys shared by both.
  const std::vector<int32_t> rows{30, 20, 10, 3, 2, 1};
  const std::vector<int32_t> keys{1, 99, 2, 99, 20, 99, 30, 99};
  TensorView q = TensorView::contiguous(rows.data() + 2, DataType::kInt32, {2, 3});
  q.stride[1] = -1;
  TensorView k = TensorView::contiguous(keys.data(), DataType::kInt32, {1, 4});
  k.stride[1] = 2;
  const Mask mask = masks::causal(3, 4).with_positions(q, k);
  EXPECT_EQ(mask.batch(), 2);
  EXPECT_EQ(mask.view().q_pos_batch, 2);
  EXPECT_EQ(mask.view().k_pos_batch, 1);
  EXPECT_EQ(to_dense(mask), (std::vector<uint8_t>{1, 1, 0, 0, 1, 1, 1, 0, 1, 1, 1, 1,     // rows at 10, 20, 30
                                                  1, 0, 0, 0, 1, 1, 0, 0, 1, 1, 0, 0}));  // at 1, 2, 3
  EXPECT_EQ(mask.memory_bytes(), static_cast<int64_t>((6 + 4) * sizeof(int32_t)));
}

TEST(Positions, ComeAndGo) {
  const Mask causal = masks::causal(2, 3);
  const Mask mask = causal.with_positions({7, 5}, {5, 6, 7});
  EXPECT_TRUE(mask.has_positions());
  EXPECT_EQ(mask.q_offset(), 0);
  EXPECT_EQ(to_dense(mask), (std::vector<uint8_t>{1, 1, 1, 1, 0, 0}));
  EXPECT_EQ(to_dense(mask.with_band(Band::window(1, 0))), (std::vector<uint8_t>{0, 1, 1, 1, 0, 0}));
  EXPECT_NE(mask.view().content_hash, causal.view().content_hash);
  EXPECT_NE(mask.view().content_hash, causal.with_positions({7, 6}, {5, 6, 7}).view().content_hash);
  EXPECT_NE(mask.view().content_hash, causal.with_positions({7, 5}, {5, 6, 8}).view().content_hash);
  EXPECT_NE(mask.view().content_hash, causal.with_positions({5, 7}, {5, 6, 7}).view().content_hash);
  const Mask without = mask.with_positions({}, {});
  EXPECT_FALSE(without.has_positions());
  EXPECT_EQ(without.q_offset(), 1);
  EXPECT_EQ(without.view().content_hash, causal.view().content_hash);
}

TEST(Positions, WithoutABandTheyHaveNoEffect) {
  const Mask mask = masks::full(2, 3).with_positions({7, 5}, {5, 6, 7});
  EXPECT_EQ(to_dense(mask), std::vector<uint8_t>(6, 1));
  EXPECT_EQ(statistics(mask).full_tiles, 1);
  EXPECT_EQ(to_dense(mask.with_band(Band::causal())), (std::vector<uint8_t>{1, 1, 1, 1, 0, 0}));
}

TEST(Positions, OfAMaskWithoutElements) {
  const Mask rows({.seqlen_q = 2, .seqlen_k = 0, .band = Band::causal(), .q_pos = {1, 2}});
  EXPECT_EQ(rows.batch(), 1);
  EXPECT_TRUE(to_dense(rows).empty());
  const Mask keys(
      {.seqlen_q = 0, .seqlen_k = 2, .band = Band::causal(), .position_batch = 3, .k_pos = {1, 2, 1, 2, 1, 2}});
  EXPECT_EQ(keys.batch(), 1);
}

TEST(Positions, EdgesOfTheBandThatNothingIsBeyond) {
  const Mask mask({.seqlen_q = 2, .seqlen_k = 2, .q_pos = {INT32_MIN, INT32_MAX}, .k_pos = {INT32_MIN, INT32_MAX}});
  EXPECT_EQ(to_dense(mask.with_band(Band::causal())), (std::vector<uint8_t>{1, 0, 1, 1}));
  EXPECT_EQ(to_dense(mask.with_band(Band::window(INT32_MAX - 1, -1))), (std::vector<uint8_t>{1, 1, 0, 1}));
  for (const int64_t open : {int64_t{INT32_MAX}, INT64_MAX}) {
    EXPECT_TRUE(mask.with_band(Band::window(open, open)).band().unbounded());
  }
  EXPECT_EQ(to_dense(mask.with_band({.lo = INT32_MAX, .hi = std::nullopt})), (std::vector<uint8_t>{0, 1, 0, 0}));
}

// --- putting together ---------------------------------------------------------------------------------

std::vector<uint8_t> both(const std::vector<uint8_t>& a, const std::vector<uint8_t>& b) {
  std::vector<uint8_t> all;
  for (std::size_t at = 0; at < a.size(); ++at) all.push_back(a[at] & b[at]);
  return all;
}

TEST(Positions, Crop) {
  Random random(3);
  for (int64_t n = 0; n < scaled(200); ++n) {
    MaskParts parts = random_positioned(random, 40);
    parts.block_mask.clear();
    const Mask mask(parts);
    const auto range = [&](int64_t seqlen) {
      const int64_t a = random.integer(0, seqlen), b = random.integer(0, seqlen);
      return std::pair(std::min(a, b), std::max(a, b));
    };
    const auto [row_begin, row_end] = range(parts.seqlen_q);
    const auto [key_begin, key_end] = range(parts.seqlen_k);
    const Mask piece = crop(mask, row_begin, row_end, key_begin, key_end);
    std::vector<uint8_t> expected;
    for (int64_t b = 0; b < piece.batch(); ++b) {
      for (int64_t h = 0; h < piece.heads(); ++h) {
        for (int64_t i = row_begin; i < row_end; ++i) {
          for (int64_t j = key_begin; j < key_end; ++j) expected.push_back(mask.visible(b, h, i, j));
        }
      }
    }
    ASSERT_TRUE(to_dense(piece) == expected) << n;
  }
}

TEST(Positions, IntersectionIsExact) {
  Random random(4);
  int64_t lists = 0;
  const int64_t cases = scaled(600);
  for (int64_t n = 0; n < cases; ++n) {
    MaskParts a = random_parts(random, random_kind(random), random.integer(1, 12), random.integer(1, 8));
    MaskParts b = random_parts(random, random_kind(random), a.seqlen_q, a.seqlen_k);
    draw_positions(random, 1, a);
    const int64_t how = random.integer(0, 2);  // the other mask's positions: none, equal ones, its own
    if (how == 1) b.q_offset.reset(), b.q_pos = a.q_pos, b.k_pos = a.k_pos;
    if (how == 2) draw_positions(random, 1, b);
    if (random.flip()) std::swap(a, b);
    const Mask mask = intersect(Mask(a), Mask(b));
    ASSERT_TRUE(to_dense(mask) == both(dense_by_rule(a), dense_by_rule(b))) << n;
    ASSERT_TRUE(mask.has_positions()) << n;
    lists += mask.has_interval_lists();
  }
  EXPECT_GT(lists, 0);
  EXPECT_LT(lists, cases / 2);
}

TEST(Positions, ConcatenationIsExact) {
  Random random(5);
  int64_t kept = 0;
  for (int64_t n = 0; n < scaled(300); ++n) {
    MaskParts a = random_parts(random, ColumnKind::kEviction, random.integer(1, 6), random.integer(1, 6));
    MaskParts b = random_parts(random, ColumnKind::kEviction, random.integer(1, 6), random.integer(1, 6));
    draw_positions(random, random.integer(1, 2), a);
    draw_positions(random, 1, b);
    if (random.flip()) b.band = a.band;
    const std::vector<Mask> pieces{Mask(a), Mask(b)};
    const Mask mask = concatenate(pieces);
    kept += mask.has_positions();
    for (int64_t m = 0; m < mask.batch(); ++m) {
      for (int64_t i = 0; i < mask.seqlen_q(); ++i) {
        for (int64_t j = 0; j < mask.seqlen_k(); ++j) {
          const bool first = i < a.seqlen_q && j < a.seqlen_k, second = i >= a.seqlen_q && j >= a.seqlen_k;
          const bool expected =
              first    ? pieces[0].visible(std::min(m, pieces[0].batch() - 1), 0, i, j)
              : second ? pieces[1].visible(std::min(m, pieces[1].batch() - 1), 0, i - a.seqlen_q, j - a.seqlen_k)
                       : false;
          ASSERT_EQ(mask.visible(m, 0, i, j), expected) << n;
        }
      }
    }
  }
  EXPECT_GT(kept, 0);
}

TEST(Positions, BecomeVectorsWhereTheyFit) {
  // Rows in reverse: what is causal by positions hides the later rows from each key.
  const Mask mask = masks::causal(4, 4).with_positions({3, 2, 1, 0}, {0, 1, 2, 3});
  const StartEndRowIndices indices = to_startend_row_indices(mask);
  EXPECT_EQ(indices.vectors, 2);
  EXPECT_FALSE(indices.causal);
  EXPECT_EQ(indices.values, (std::vector<int32_t>{4, 0, 3, 0, 2, 0, 1, 0}));
  // Every second row.
  const Mask scattered = masks::causal(7, 1).with_positions({0, 1, 0, 1, 0, 1, 0}, {1});
  expect_error(ErrorCode::kUnrepresentable, {"column 0", "needs 4"}, [&] { to_startend_row_indices(scattered); });
}

}  // namespace
}  // namespace flashmask::test
