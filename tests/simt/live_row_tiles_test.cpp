// SPDX-License-Identifier: Apache-2.0
// The backward's walk over the live row tiles of a key tile, of a plan in bits and of the same one in runs.

#include "backends/cuda/sm80/backward/live_row_tiles.cuh"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "common/random.h"
#include "simt/random_lines.h"

namespace flashmask::sm80::bwd {
namespace {

constexpr int32_t kWords = 70, kKeyBlocks = 3, kHeads = 4, kFirstHead = 1, kLastHead = 2, kKeyBlockKeys = 128;
constexpr uint32_t kUntouched = 0, kPartial = 1, kFull = 2;

/// The part of a kernel's traits that the walk reads: rows and keys of a tile.
template <int kRows, int kKeys_>
struct Tile {
  static constexpr int kKeys = kKeys_, kGranules = kRows < 64 ? 1 : kRows / 64,
                       kTilesOfGranule = kRows < 64 ? 64 / kRows : 1, kTilesOfBlock = kKeyBlockKeys / kKeys;
};

template <typename Traits>
void walk(const BackwardParams& p, int32_t key_tile, uint32_t* found) {
  LiveRowTiles<Traits> tiles(p, 0, kLastHead + 1, key_tile);
  for (RowTile tile{kFirstHead, -1, false}; tiles.next(tile);) {
    if (threadIdx.x != 0) continue;
    found[static_cast<int32_t>(tile.head) * p.row_tiles + tile.index] += tile.partial ? kPartial : kFull;
  }
}

/// A key tile's row tiles as the plan's bits have them, head by head.
template <typename Traits>
std::vector<uint32_t> expected_tiles(const BackwardParams& p, const RandomLines& live, const RandomLines& full,
                                     int32_t key_tile) {
  std::vector<uint32_t> result(static_cast<std::size_t>(kHeads * p.row_tiles));
  for (int32_t head = kFirstHead; head <= kLastHead; ++head) {
    const int32_t line = head * kKeyBlocks + key_tile / Traits::kTilesOfBlock;
    for (int32_t tile = 0; tile < p.row_tiles; ++tile) {
      const int32_t granule = tile / Traits::kTilesOfGranule * Traits::kGranules;
      bool is_live = false, is_full = (key_tile + 1) * Traits::kKeys <= p.seqlen_k;
      for (int32_t g = granule; g < granule + Traits::kGranules; ++g)
        is_live |= live.has(line, g), is_full &= full.has(line, g);
      result[static_cast<std::size_t>(head * p.row_tiles + tile)] =
          !is_live ? kUntouched : (is_full ? kFull : kPartial);
    }
  }
  return result;
}

template <typename Traits>
void expect_tiles() {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    Random random(seed);
    const RandomLines live(random, kHeads * kKeyBlocks, kWords), full(random, kHeads * kKeyBlocks, kWords);
    BackwardParams p{};
    p.key_blocks = kKeyBlocks;
    p.seqlen_k = kKeyBlocks * kKeyBlockKeys - 1;  // the last key tile lacks a key
    p.row_tiles = kWords * 32 / Traits::kGranules * Traits::kTilesOfGranule;
    for (const bool in_runs : {false, true}) {
      p.plan = {.key_live = live.granules(in_runs),
                .key_full = full.granules(in_runs),
                .row_live = nullptr,
                .key_order = nullptr,
                .words_per_key = kWords,
                .words_per_row = 0,
                .row_granules = kWords * 32,
                .mask_heads = kHeads,
                .sharing = {1, 1},
                .in_runs = in_runs};
      for (int32_t key_tile = 0; key_tile < kKeyBlocks * Traits::kTilesOfBlock; ++key_tile) {
        std::vector<uint32_t> found(static_cast<std::size_t>(kHeads * p.row_tiles));
        simt::launch(walk<Traits>, 1, 32, 0, p, key_tile, found.data());
        ASSERT_EQ(found, (expected_tiles<Traits>(p, live, full, key_tile)))
            << "seed " << seed << ", key tile " << key_tile << (in_runs ? ", in runs" : ", in bits");
      }
    }
  }
}

TEST(LiveRowTiles, AreFoundOneByOne) {
  expect_tiles<Tile<64, 128>>();
  expect_tiles<Tile<128, 128>>();
  expect_tiles<Tile<64, 64>>();
  expect_tiles<Tile<32, 64>>();
}

}  // namespace
}  // namespace flashmask::sm80::bwd
