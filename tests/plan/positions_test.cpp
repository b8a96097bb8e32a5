// SPDX-License-Identifier: Apache-2.0
// Classes of tiles under a band over positions: conservative, and just as conservative as documented.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "flashmask/builders.h"
#include "flashmask/inspect.h"
#include "flashmask/plan.h"
#include "support/brute_force.h"
#include "support/extent.h"
#include "support/independent_rule.h"
#include "support/random_masks.h"

namespace flashmask::test {
namespace {

struct Range {
  int64_t least = INT64_MAX, greatest = INT64_MIN;
};

Range range_of(const std::vector<int32_t>& positions, int64_t first, int64_t begin, int64_t end) {
  Range range;
  for (int64_t n = begin; n < end; ++n) {
    const int64_t position = positions[static_cast<std::size_t>(first + n)];
    range.least = std::min(range.least, position);
    range.greatest = std::max(range.greatest, position);
  }
  return range;
}

/// The classes of a mask without its band, exactly, and the band judged by minima and maxima.
std::vector<TileClass> judged_classes(const MaskParts& parts, int64_t batch, int64_t m, int64_t heads) {
  MaskParts without_band = parts;
  without_band.band = Band::none();
  const auto dense = dense_by_rule(without_band, batch, heads);
  const Dense own = matrix(dense, m, parts.seqlen_q, parts.seqlen_k);
  const int64_t entry = m / heads * parts.position_batch / batch;
  std::vector<TileClass> classes;
  for (int64_t i = 0; i < parts.seqlen_q; i += kGranuleRows) {
    const Range rows = range_of(parts.q_pos, entry * parts.seqlen_q, i, std::min(i + kGranuleRows, parts.seqlen_q));
    for (int64_t j = 0; j < parts.seqlen_k; j += kGranuleKeys) {
      const Range keys = range_of(parts.k_pos, entry * parts.seqlen_k, j, std::min(j + kGranuleKeys, parts.seqlen_k));
      const auto& [lo, hi] = parts.band;
      const bool some = (!lo || keys.greatest - rows.least >= *lo) && (!hi || keys.least - rows.greatest <= *hi);
      const bool all = (!lo || keys.least - rows.greatest >= *lo) && (!hi || keys.greatest - rows.least <= *hi);
      const TileClass of_rest = class_of(own, {kGranuleRows, kGranuleKeys}, i / kGranuleRows, j / kGranuleKeys);
      classes.push_back(!some ? TileClass::kEmpty : all ? of_rest : std::min(of_rest, TileClass::kPartial));
    }
  }
  return classes;
}

TEST(PlanOfPositions, IsConservativeAndNoMore) {
  Random random(1);
  int64_t empty = 0, full = 0, unneeded = 0, shorter = 0;
  for (int64_t n = 0; n < scaled(120); ++n) {
    MaskParts parts = random_parts(random, random_kind(random), random.integer(1, 500), random.integer(1, 700),
                                   random.integer(1, 2), random.integer(1, 2));
    draw_positions(random, random.flip() ? 1 : parts.batch, parts);
    if (random.integer(0, 3) == 0) draw_block_mask(random, 1, 1, parts);
    const Mask mask(parts);
    const Plan plan(mask);
    const auto dense = dense_by_rule(parts);
    for (int64_t b = 0; b < mask.batch(); ++b) {
      const VisibleExtent extent = plan.view().extent(b);
      ASSERT_EQ(extent, extent_of(dense, b, mask.heads(), parts.seqlen_q, parts.seqlen_k)) << n;
      shorter += extent.rows < parts.seqlen_q && extent.keys < parts.seqlen_k;
    }
    for (int64_t m = 0; m < mask.batch() * mask.heads(); ++m) {
      const auto expected = judged_classes(parts, mask.batch(), m, mask.heads());
      const auto exact = classes_of(matrix(dense, m, parts.seqlen_q, parts.seqlen_k), {kGranuleRows, kGranuleKeys});
      for (std::size_t at = 0; at < expected.size(); ++at) {
        const auto r = static_cast<int64_t>(at) / plan.view().layout().key_blocks,
                   c = static_cast<int64_t>(at) % plan.view().layout().key_blocks;
        const TileClass got = plan.view().granule(m, r, c);
        ASSERT_EQ(got, expected[at]) << n << ": granule (" << r << ", " << c << ") of mask " << m;
        ASSERT_TRUE(got == TileClass::kPartial || got == exact[at]) << n << ": a class that is not so";
        empty += got == TileClass::kEmpty;
        full += got == TileClass::kFull;
        unneeded += got != exact[at];
      }
    }
  }
  EXPECT_GT(empty, 0);
  EXPECT_GT(full, 0);
  EXPECT_GT(shorter, 0) << "no extent ends before the mask does";
  EXPECT_GT(unneeded, 0) << "no case was conservative: the test says nothing";
}

TEST(PlanOfPositions, TilesAndStatisticsAreWhatIsExecuted) {
  Random random(2);
  for (int64_t n = 0; n < scaled(60); ++n) {
    MaskParts parts = random_parts(random, random_kind(random), random.integer(1, 500), random.integer(1, 700));
    draw_positions(random, random.integer(1, 2), parts);
    if (random.flip()) draw_block_mask(random, 1, 2, parts);
    const Mask mask(parts);
    const Plan plan(mask);
    for (const TileShape shape : {TileShape{64, 128}, {128, 128}, {192, 128}, {128, 256}}) {
      const TiledPlanView tiled(plan.view(), shape);
      const MaskStatistics sums = statistics(mask, shape);
      EXPECT_EQ(sums.live_tiles(), tiled.live_tiles()) << n;
      for (int64_t m = 0; m < mask.batch() * mask.heads(); ++m) {
        const TileGrid grid = classify_tiles(mask, m / mask.heads(), m % mask.heads(), shape);
        for (int64_t r = 0; r < grid.row_tiles; ++r) {
          for (int64_t c = 0; c < grid.key_tiles; ++c) ASSERT_EQ(grid.at(r, c), tiled.tile(m, r, c)) << n;
        }
      }
    }
  }
}

TEST(PlanOfPositions, OneTileOfEverything) {
  const Mask mask = masks::causal(3, 3).with_positions({5, 6, 7}, {1, 2, 3});
  EXPECT_EQ(classify_tiles(mask, 0, 0, {INT64_MAX, INT64_MAX}).classes, std::vector{TileClass::kFull});
  EXPECT_EQ(statistics(mask.with_positions({0, 0, 0}, {1, 2, 3}), {int64_t{1} << 40, 7}).live_tiles(), 0);
}

}  // namespace
}  // namespace flashmask::test
