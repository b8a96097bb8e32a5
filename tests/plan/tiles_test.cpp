// SPDX-License-Identifier: Apache-2.0
// classify_tiles at any tile shape against looking at every element.
#include "flashmask/tiles.h"

#include <gtest/gtest.h>

#include "families/families.h"
#include "flashmask/builders.h"
#include "support/brute_force.h"
#include "support/cpu_time.h"
#include "support/expect_error.h"
#include "support/extent.h"
#include "support/independent_rule.h"
#include "support/random_masks.h"

namespace flashmask::test {
namespace {

void expect_tiles(const Mask& mask, const std::vector<uint8_t>& dense, TileShape shape, const std::string& what) {
  for (int64_t b = 0; b < mask.batch(); ++b) {
    for (int64_t h = 0; h < mask.heads(); ++h) {
      const TileGrid grid = classify_tiles(mask, b, h, shape);
      ASSERT_EQ(grid.shape, shape) << what;
      ASSERT_EQ(grid.row_tiles, (mask.seqlen_q() + shape.rows - 1) / shape.rows) << what;
      ASSERT_EQ(grid.key_tiles, (mask.seqlen_k() + shape.keys - 1) / shape.keys) << what;
      const auto expected = classes_of(matrix(dense, b * mask.heads() + h, mask.seqlen_q(), mask.seqlen_k()), shape);
      ASSERT_TRUE(grid.classes == expected)
          << what << " (" << b << ", " << h << ") " << shape.rows << "x" << shape.keys;
      for (std::size_t at = 0; at < expected.size(); at += 7) {
        ASSERT_EQ(grid.at(static_cast<int64_t>(at) / grid.key_tiles, static_cast<int64_t>(at) % grid.key_tiles),
                  expected[at]);
      }
    }
  }
}

TEST(Tiles, RandomMasksAndShapes) {
  Random random(1);
  for (int64_t n = 0; n < scaled(400); ++n) {
    const MaskParts parts = random_parts(random, random_kind(random), random.integer(1, 200), random.integer(1, 200),
                                         random.integer(1, 2), random.integer(1, 2));
    const TileShape shape{random.integer(1, 90), random.integer(1, 90)};
    expect_tiles(Mask(parts), dense_by_rule(parts), shape, "case " + std::to_string(n));
    if (HasFailure()) return;
  }
}

TEST(Tiles, BlockMasksUnderAnyTile) {
  Random random(2);
  for (int64_t n = 0; n < scaled(60); ++n) {
    MaskParts parts = random_parts(random, random_kind(random), random.integer(1, 500), random.integer(1, 500), 1,
                                   random.integer(1, 2));
    draw_block_mask(random, random.integer(1, 2), 2, parts);
    const auto dense = dense_by_rule(parts);
    for (const TileShape shape :
         {TileShape{64, 128}, {128, 128}, {192, 256}, {random.integer(1, 300), random.integer(1, 300)}, {8, 129}}) {
      expect_tiles(Mask(parts), dense, shape, "case " + std::to_string(n));
      if (HasFailure()) return;
    }
  }
}

TEST(Tiles, TheTileMayBeLargerThanTheMask) {
  const Mask mask = masks::causal(5, 7);
  const TileGrid grid = classify_tiles(mask, 0, 0, {int64_t{1} << 40, INT64_MAX});
  EXPECT_EQ(grid.classes, std::vector{TileClass::kPartial});
  EXPECT_EQ(classify_tiles(masks::full(5, 7), 0, 0, {INT64_MAX, INT64_MAX}).classes, std::vector{TileClass::kFull});
}

TEST(Tiles, EmptySides) {
  for (const auto& [q, k] : {std::pair<int64_t, int64_t>{0, 0}, {0, 300}, {300, 0}}) {
    const TileGrid grid = classify_tiles(masks::causal(q, k), 0, 0);
    EXPECT_EQ(grid.row_tiles, (q + 127) / 128);
    EXPECT_EQ(grid.key_tiles, (k + 127) / 128);
    EXPECT_TRUE(grid.classes.empty());
  }
}

TEST(Tiles, DefaultShape) { EXPECT_EQ(classify_tiles(masks::full(300, 300), 0, 0).shape, (TileShape{128, 128})); }

TEST(Tiles, EveryFamily) {
  for (const Family& family : families()) {
    const Mask mask = make_family(family.name, 401, {}, 3);
    expect_tiles(mask, dense_by_rule(parts_of(mask)), {64, 128}, std::string(family.name));
    expect_tiles(mask, dense_by_rule(parts_of(mask)), {32, 16}, std::string(family.name));
  }
}

TEST(Tiles, TheLongestMaskInAFewTiles) {
  // One row of tiles over the longest sequence: time and memory follow the tiles, not the elements.
  const Mask mask({.seqlen_q = kMaxSeqlen, .seqlen_k = 3, .lts = {kMaxSeqlen, 1, 0}});
  using enum TileClass;
  const TileGrid grid = classify_tiles(mask, 0, 0, {int64_t{1} << 30, 1});
  EXPECT_EQ(grid.classes, (std::vector{kFull, kPartial, kEmpty, kFull, kEmpty, kEmpty}));
}

TEST(Tiles, TimeFollowsTheColumns) {
  // 2^34 elements: looking at each would take seconds, at the columns and tiles milliseconds.
  const Mask mask = make_family("random_eviction", 1 << 17, {}, 1);
  const double start = cpu_seconds();
  const TileGrid grid = classify_tiles(mask, 0, 0, {1024, 1024});
  const double seconds = cpu_seconds() - start;
  EXPECT_EQ(grid.row_tiles, 128);
  if (kMeasured) {
    EXPECT_LT(seconds, 0.5);
  }
}

TEST(TileErrors, ShapeAndIndex) {
  const Mask mask({.seqlen_q = 4, .seqlen_k = 1, .batch = 2, .heads = 3, .lts = {1, 1, 1, 1, 1, 1}});
  expect_invalid({"tile is 0x128", "at least 1"}, [&] { classify_tiles(mask, 0, 0, {0, 128}); });
  expect_invalid({"tile is 64x-1", "at least 1"}, [&] { classify_tiles(mask, 0, 0, {64, -1}); });
  expect_invalid({"(batch 2, head 0)", "[2, 3]"}, [&] { classify_tiles(mask, 2, 0); });
  expect_invalid({"(batch -1, head 0)", "[2, 3]"}, [&] { classify_tiles(mask, -1, 0); });
  expect_invalid({"(batch 0, head 3)", "[2, 3]"}, [&] { classify_tiles(mask, 0, 3); });
  expect_invalid({"(batch 0, head -1)", "[2, 3]"}, [&] { classify_tiles(mask, 0, -1); });
}

}  // namespace
}  // namespace flashmask::test
