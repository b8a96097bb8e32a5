// SPDX-License-Identifier: Apache-2.0
// The walk through a unit's class bits, against a list of all of them.

#include "backends/cuda/cache/live_blocks.cuh"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "common/random.h"

namespace flashmask::cuda {
namespace {

/// The bits of one unit: words at random, with long runs of empty ones between.
struct Unit {
  std::vector<uint32_t> live, full;
  CachedParams params{};
  RowTile tile{};

  Unit(Random& random, int32_t words) : live(static_cast<std::size_t>(words)), full(live.size()) {
    for (std::size_t n = 0; n < live.size(); ++n) {
      if (random.integer(0, 9) != 0) continue;
      live[n] = static_cast<uint32_t>(random.integer(0, 0xffffffffLL));
      full[n] = live[n] & static_cast<uint32_t>(random.integer(0, 0xffffffffLL));
    }
    WorkPlan& plan = params.plan;
    plan.live_bits = live.data();
    plan.full_bits = full.data();
    plan.words = words;
    plan.mask_heads = plan.splits = 1;
    plan.has_classes = 1;
    tile.keys = words * kBlocksOfWord * kBlockKeys - static_cast<int32_t>(random.integer(0, 40 * kBlockKeys));
  }
  int32_t blocks() const { return (tile.keys + kBlockKeys - 1) / kBlockKeys; }
  bool has(const std::vector<uint32_t>& bits, int32_t block) const {
    return (bits[static_cast<std::size_t>(block / kBlocksOfWord)] >> block % kBlocksOfWord & 1) != 0;
  }
};

template <bool kPasses>
void expect_walk(const Unit& unit, int32_t skipped) {
  LiveBlocks walk;
  walk.begin(unit.params, unit.tile, 0, skipped);
  for (int32_t block = 0, n = 0; block < unit.blocks(); ++block) {
    if (!unit.has(unit.live, block) || n++ < skipped) continue;
    const LiveBlocks::Block found = walk.next<kPasses>(unit.params);
    ASSERT_EQ(found.index, block);
    ASSERT_EQ(found.masked, !unit.has(unit.full, block));
  }
}

TEST(LiveBlocks, comeInOrderFromAnyOn) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    Random random(seed);
    const Unit unit(random, static_cast<int32_t>(random.integer(2, 150)));
    int32_t all = 0;
    for (int32_t block = 0; block < unit.blocks(); ++block) all += unit.has(unit.live, block);
    for (const int32_t skipped : {0, 1, all / 2, all}) {
      SCOPED_TRACE(testing::Message() << "seed " << seed << ", skipped " << skipped << " of " << all);
      expect_walk<true>(unit, skipped);
      expect_walk<false>(unit, skipped);
    }
  }
}

}  // namespace
}  // namespace flashmask::cuda
