// SPDX-License-Identifier: Apache-2.0
// Statistics against counting every element, and the FLOPs of the paper's convention.
#include <gtest/gtest.h>

#include "families/families.h"
#include "flashmask/builders.h"
#include "flashmask/inspect.h"
#include "support/brute_force.h"
#include "support/cpu_time.h"
#include "support/expect_error.h"
#include "support/extent.h"
#include "support/independent_rule.h"
#include "support/random_masks.h"

namespace flashmask::test {
namespace {

void expect_statistics(const Mask& mask, const std::vector<uint8_t>& dense, TileShape tile, const std::string& what) {
  const MaskStatistics got = statistics(mask, tile);
  MaskStatistics expected{.elements = static_cast<int64_t>(dense.size()), .tile = tile};
  for (const uint8_t element : dense) expected.visible += element;
  for (int64_t m = 0; m < mask.batch() * mask.heads(); ++m) {
    for (const TileClass tile_class : classes_of(matrix(dense, m, mask.seqlen_q(), mask.seqlen_k()), tile)) {
      ++expected.tiles;
      expected.partial_tiles += tile_class == TileClass::kPartial;
      expected.full_tiles += tile_class == TileClass::kFull;
    }
  }
  ASSERT_EQ(got.elements, expected.elements) << what;
  ASSERT_EQ(got.visible, expected.visible) << what;
  ASSERT_EQ(got.tile, tile) << what;
  ASSERT_EQ(got.tiles, expected.tiles) << what;
  ASSERT_EQ(got.partial_tiles, expected.partial_tiles) << what;
  ASSERT_EQ(got.full_tiles, expected.full_tiles) << what;
}

TEST(Statistics, RandomMasks) {
  Random random(1);
  for (int64_t n = 0; n < scaled(400); ++n) {
    const MaskParts parts = random_parts(random, random_kind(random), random.integer(1, 300), random.integer(1, 300),
                                         random.integer(1, 2), random.integer(1, 3));
    const TileShape tile{random.integer(1, 200), random.integer(1, 200)};
    expect_statistics(Mask(parts), dense_by_rule(parts), tile, "case " + std::to_string(n));
    if (HasFatalFailure()) return;
  }
}

TEST(Statistics, BlockMasks) {
  Random random(2);
  for (int64_t n = 0; n < scaled(80); ++n) {
    MaskParts parts = random_parts(random, random_kind(random), random.integer(1, 500), random.integer(1, 500),
                                   random.integer(1, 2), random.integer(1, 2));
    draw_block_mask(random, random.flip() ? 1 : parts.batch, parts.heads * random.integer(1, 2), parts);
    const auto dense = dense_by_rule(parts);
    for (const TileShape tile :
         {TileShape{128, 128}, {64, 128}, {16, 8}, {192, 256}, {random.integer(1, 300), random.integer(1, 300)}}) {
      expect_statistics(Mask(parts), dense, tile, "case " + std::to_string(n));
      if (HasFatalFailure()) return;
    }
  }
}

TEST(Statistics, EveryFamily) {
  for (const Family& family : families()) {
    for (const int64_t seqlen : {0, 1, 7, 129, 300}) {
      const Mask mask = make_family(family.name, seqlen, {}, 4);
      if (seqlen > 0)
        expect_statistics(mask, dense_by_rule(parts_of(mask)), {128, 128},
                          std::string(family.name) + " " + std::to_string(seqlen));
    }
  }
}

TEST(Statistics, Empty) {
  for (const auto& [q, k] : {std::pair<int64_t, int64_t>{0, 0}, {0, 300}, {300, 0}}) {
    const MaskStatistics s = statistics(masks::causal(q, k));
    EXPECT_EQ(s.elements, 0);
    EXPECT_EQ(s.visible, 0);
    EXPECT_EQ(s.tiles, 0);
    EXPECT_EQ(s.live_tiles(), 0);
    EXPECT_EQ(s.visible_share(), 0);
    EXPECT_EQ(s.live_share(), 0);
  }
}

TEST(Statistics, Shares) {
  const MaskStatistics s = statistics(masks::causal(256, 256));
  EXPECT_EQ(s.tile, (TileShape{128, 128}));
  EXPECT_EQ(s.live_tiles(), 3);
  EXPECT_EQ(s.full_tiles, 1);
  EXPECT_DOUBLE_EQ(s.visible_share(), 257.0 / 512);
  EXPECT_DOUBLE_EQ(s.live_share(), 0.75);
  // Statistics cover all heads together.
  const Mask heads({.seqlen_q = 128, .seqlen_k = 128, .heads = 2, .lts = [] {
                      std::vector<int32_t> lts(256, 0);
                      std::fill(lts.begin() + 128, lts.end(), 128);
                      return lts;
                    }()});
  EXPECT_EQ(statistics(heads).tiles, 2);
  EXPECT_DOUBLE_EQ(statistics(heads).visible_share(), 0.5);
}

TEST(Statistics, AMillionTokens) {
  // The sum over documents of n (n + 1) / 2, exact, and far from an element-wise count in time.
  const int64_t total = int64_t{1} << 20;
  Random random(3);
  std::vector<int64_t> lengths;
  int64_t visible = 0;
  for (int64_t left = total; left > 0; left -= lengths.back()) {
    lengths.push_back(std::min<int64_t>(left, random.integer(1, 60000)));
    visible += lengths.back() * (lengths.back() + 1) / 2;
  }
  const Mask mask = masks::causal_document(Documents::from_lengths(lengths));
  const double start = cpu_seconds();
  const MaskStatistics s = statistics(mask);
  const double seconds = cpu_seconds() - start;
  EXPECT_EQ(s.elements, total * total);
  EXPECT_EQ(s.visible, visible);
  EXPECT_EQ(s.tiles, (total / 128) * (total / 128));
  if (kMeasured) {
    EXPECT_LT(seconds, 5.0);
  }
}

TEST(Statistics, ManyTilesOfWhichFewDiffer) {
  const int64_t seqlen = int64_t{1} << 22, tiles = seqlen / 8;  // 2^38 tiles
  const Mask mask({.seqlen_q = seqlen, .seqlen_k = seqlen, .band = Band::causal()});
  const double start = cpu_seconds();
  const MaskStatistics s = statistics(mask, {8, 8});
  const double seconds = cpu_seconds() - start;
  EXPECT_EQ(s.tiles, tiles * tiles);
  EXPECT_EQ(s.partial_tiles, tiles);
  EXPECT_EQ(s.full_tiles, tiles * (tiles - 1) / 2);
  if (kMeasured) {
    EXPECT_LT(seconds, 5.0);
  }
}

TEST(Statistics, Errors) {
  expect_invalid({"tile is 0x128", "at least 1"}, [] { statistics(masks::full(4, 4), {0, 128}); });
  expect_invalid({"tile is 128x-3", "at least 1"}, [] { statistics(masks::full(4, 4), {128, -3}); });
}

TEST(Flops, ThePapersConvention) {
  // 4 B H N^2 d forward, 2.5 times that backward, times the share.
  const AttentionFlops dense = attention_flops(2, 8, 4096, 4096, 128, 128, 1);
  EXPECT_DOUBLE_EQ(dense.forward, 4.0 * 2 * 8 * 4096 * 4096 * 128);
  EXPECT_DOUBLE_EQ(dense.backward, 2.5 * dense.forward);
  EXPECT_DOUBLE_EQ(attention_flops(2, 8, 4096, 4096, 128, 128, 0.25).forward, dense.forward / 4);
  // Products by hand at unequal sizes: scores over 3, values over 5; backward has three of the first and two of
  // the second.
  const AttentionFlops small = attention_flops(1, 1, 7, 11, 3, 5, 1);
  EXPECT_DOUBLE_EQ(small.forward, 2.0 * 7 * 11 * (3 + 5));
  EXPECT_DOUBLE_EQ(small.backward, 2.0 * 7 * 11 * (3 * 3 + 2 * 5));
  EXPECT_EQ(attention_flops(0, 8, 10, 10, 8, 8, 1).forward, 0);
  EXPECT_EQ(attention_flops(1, 8, 10, 10, 8, 8, 0).backward, 0);
}

TEST(Flops, Errors) {
  expect_invalid({"batch is -1", "at least 0"}, [] { attention_flops(-1, 1, 1, 1, 1, 1, 1); });
  expect_invalid({"heads is -2"}, [] { attention_flops(1, -2, 1, 1, 1, 1, 1); });
  expect_invalid({"seqlen_q is -3"}, [] { attention_flops(1, 1, -3, 1, 1, 1, 1); });
  expect_invalid({"seqlen_k is -4"}, [] { attention_flops(1, 1, 1, -4, 1, 1, 1); });
  expect_invalid({"head_dim is -5"}, [] { attention_flops(1, 1, 1, 1, -5, 1, 1); });
  expect_invalid({"head_dim_v is -6"}, [] { attention_flops(1, 1, 1, 1, 1, -6, 1); });
  expect_invalid({"share is 1.5", "between 0 and 1"}, [] { attention_flops(1, 1, 1, 1, 1, 1, 1.5); });
  expect_invalid({"share is -0.5"}, [] { attention_flops(1, 1, 1, 1, 1, 1, -0.5); });
  expect_invalid({"share is "}, [] { attention_flops(1, 1, 1, 1, 1, 1, std::numeric_limits<double>::quiet_NaN()); });
}

}  // namespace
}  // namespace flashmask::test
