// SPDX-License-Identifier: Apache-2.0
// The forwards' walks over the live key blocks of a row tile, of a plan in bits and of the same one in runs.

#include "backends/cuda/sm80/forward/key_block_word.cuh"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "backends/cuda/device/tile_walk.cuh"
#include "common/random.h"
#include "simt/random_lines.h"

namespace flashmask::sm80 {
namespace {

constexpr int32_t kWords = 70;

/// Rows of a plan.
struct Rows {
  int32_t count;
  RandomLines live, full;

  Rows(Random& random, int32_t rows) : count(rows), live(random, rows, kWords), full(random, rows, kWords) {}
  cuda::RowPlanBits plan(bool in_runs) const {
    return {.row_live = live.granules(in_runs),
            .row_full = full.granules(in_runs),
            .row_tile_order = nullptr,
            .words_per_row = kWords,
            .row_granules = count,
            .mask_heads = 1,
            .sharing = {1, 1},
            .in_runs = in_runs};
  }
};

using Word = KeyBlockWord<1>;
using Walk = void (*)(cuda::RowPlanBits plan, int32_t granule, uint32_t* classes);

/// The walk of mma.sync's forward: a lane for each block of a word.
template <int kGranules>
void walk_by_lanes(cuda::RowPlanBits plan, int32_t granule, uint32_t* classes) {
  const uint32_t lane = ptx::lane();
  KeyBlockWord<kGranules> blocks;
  for (int32_t word = 0; blocks.find(plan, 0, granule, word); ++word)
    if (blocks.any >> lane & 1) classes[word * 32 + static_cast<int32_t>(lane)] = blocks.classes(lane, true);
}

/// The walk of Hopper's forward, which also says how many blocks there are.
template <int kGranules>
void walk_words(cuda::RowPlanBits plan, int32_t granule, uint32_t* classes) {
  cuda::RowTileWalk<kGranules, Word::kBits, cuda::RowPlanBits> walk(plan, 0, granule / kGranules);
  for (int32_t first = 0; first < plan.words_per_row; first += 32) {
    walk.load(first);
    int32_t left = walk.count();
    walk.for_each(first, [&](int32_t block, uint32_t live, uint32_t full) {
      classes[block] = live * Word::kLive | full * Word::kFull;
      --left;
    });
    if (left != 0) classes[0] = ~0u;
  }
}

std::vector<uint32_t> classes_of(Walk walk, const Rows& rows, bool in_runs, int32_t granule) {
  std::vector<uint32_t> classes(kWords * 32);
  simt::launch(walk, 1, 32, 0, rows.plan(in_runs), granule, classes.data());
  return classes;
}

/// Compares a walk with the rows' bits.
void expect_classes(Walk walk, int32_t granules) {
  for (uint64_t seed = 0; seed < 100; ++seed) {
    Random random(seed);
    const Rows rows(random, 5);  // the last tile lacks a granule
    for (int32_t granule = 0; granule < rows.count; granule += granules) {
      std::vector<uint32_t> expected(kWords * 32);
      for (int32_t block = 0; block < kWords * 32; ++block) {
        uint32_t classes = 0;
        bool is_live = false;
        for (int32_t g = 0; g < std::min(granules, rows.count - granule); ++g) {
          const bool live = rows.live.has(granule + g, block), full = rows.full.has(granule + g, block);
          classes |= (live * Word::kLive | full * Word::kFull) << Word::kBits * g;
          is_live |= live;
        }
        expected[static_cast<std::size_t>(block)] = is_live ? classes : 0;
      }
      for (const bool in_runs : {false, true})
        ASSERT_EQ(classes_of(walk, rows, in_runs, granule), expected)
            << "seed " << seed << ", granule " << granule << (in_runs ? ", in runs" : ", in bits");
    }
  }
}

TEST(LiveKeyBlocks, AreFoundByLanes) {
  expect_classes(walk_by_lanes<1>, 1);
  expect_classes(walk_by_lanes<2>, 2);
}
TEST(LiveKeyBlocks, AreFoundByWords) {
  expect_classes(walk_words<2>, 2);
  expect_classes(walk_words<3>, 3);
}

}  // namespace
}  // namespace flashmask::sm80
