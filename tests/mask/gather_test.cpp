// SPDX-License-Identifier: Apache-2.0
// Rows and keys of a mask by segments, against the same rows and columns of its dense matrix.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "flashmask/builders.h"
#include "flashmask/mask.h"
#include "support/expect_error.h"
#include "support/extent.h"
#include "support/independent_rule.h"
#include "support/random_masks.h"

namespace flashmask::test {
namespace {

using Segments = std::vector<RowSegment>;

std::vector<int64_t> indices_of(const Segments& segments) {
  std::vector<int64_t> indices;
  for (const RowSegment& s : segments) {
    for (int64_t i = s.begin; i < s.end; ++i) indices.push_back(i);
  }
  return indices;
}

/// Up to four ascending segments, some of them empty or neighbours, that begin and end at multiples of `unit`.
Segments random_segments(Random& random, int64_t seqlen, int64_t unit = 1) {
  std::vector<int64_t> cuts;
  for (int64_t n = 2 * random.integer(0, 4); n > 0; --n)
    cuts.push_back(std::min(random.integer(0, (seqlen + unit - 1) / unit) * unit, seqlen));
  std::sort(cuts.begin(), cuts.end());
  Segments segments;
  for (std::size_t n = 0; n < cuts.size(); n += 2) segments.push_back({cuts[n], cuts[n + 1]});
  return segments;
}

void expect_gathered(const MaskParts& parts, const Segments& rows, const Segments& keys, int64_t n) {
  const Mask mask(parts), part = gather(mask, rows, keys);
  const std::vector<int64_t> i = indices_of(rows), j = indices_of(keys);
  ASSERT_EQ(part.seqlen_q(), static_cast<int64_t>(i.size())) << n;
  ASSERT_EQ(part.seqlen_k(), static_cast<int64_t>(j.size())) << n;
  ASSERT_TRUE(part.has_positions() || !mask.has_positions() || i.empty() || j.empty()) << n;
  for (std::size_t r = 0; part.has_positions() && mask.has_positions() && r < i.size(); ++r)
    ASSERT_EQ(part.view().q_pos[r], parts.q_pos[static_cast<std::size_t>(i[r])]) << n << ": row " << r;
  for (std::size_t k = 0; part.has_positions() && mask.has_positions() && k < j.size(); ++k)
    ASSERT_EQ(part.view().k_pos[k], parts.k_pos[static_cast<std::size_t>(j[k])]) << n << ": key " << k;
  const std::vector<uint8_t> dense = dense_by_rule(parts), got = to_dense(part);
  std::size_t at = 0;
  for (int64_t b = 0; b < part.batch(); ++b) {
    for (int64_t h = 0; h < part.heads(); ++h) {
      const int64_t bh = (part.batch() == 1 ? 0 : b) * mask.heads() + (part.heads() == 1 ? 0 : h);
      for (const int64_t row : i) {
        for (const int64_t key : j) {
          ASSERT_EQ(got[at++], dense[static_cast<std::size_t>((bh * parts.seqlen_q + row) * parts.seqlen_k + key)])
              << n << ": row " << row << ", key " << key;
        }
      }
    }
  }
}

TEST(Gather, RandomMasks) {
  Random random(1);
  for (int64_t n = 0; n < scaled(3000) && !HasFatalFailure(); ++n) {
    MaskParts parts = random_parts(random, random_kind(random), random.integer(1, 24), random.integer(1, 24),
                                   random.integer(1, 2), random.integer(1, 3));
    if (random.integer(0, 4) == 0) draw_positions(random, random.flip() ? 1 : parts.batch, parts);
    Segments keys = random_segments(random, parts.seqlen_k);
    if (random.flip()) std::reverse(keys.begin(), keys.end());
    expect_gathered(parts, random_segments(random, parts.seqlen_q), keys, n);
  }
}

/// Every set of rows of small masks, under every form of vectors and band.
TEST(Gather, AllRowsOfSmallMasks) {
  Random random(2);
  constexpr int64_t kRows = 6;
  for (int64_t n = 0; n < scaled(60) && !HasFatalFailure(); ++n) {
    const MaskParts parts = random_parts(random, random_kind(random), kRows, random.integer(1, 8));
    for (int64_t set = 0; set < 1 << kRows && !HasFatalFailure(); ++set) {
      Segments rows;
      for (int64_t i = 0; i < kRows; ++i) {
        if (set >> i & 1) rows.push_back({i, i + 1});
      }
      expect_gathered(parts, rows, {{parts.seqlen_k / 2, parts.seqlen_k}, {0, parts.seqlen_k / 2}}, n);
    }
  }
}

TEST(Gather, BlockMasks) {
  Random random(3);
  for (int64_t n = 0; n < 40 && !HasFatalFailure(); ++n) {
    MaskParts parts = random_parts(random, ColumnKind::kEviction, random.integer(1, 700), random.integer(1, 700), 1,
                                   random.flip() ? 1 : 2);
    draw_block_mask(random, random.integer(1, 2), 2, parts);
    expect_gathered(parts, random_segments(random, parts.seqlen_q, 128), random_segments(random, parts.seqlen_k, 128),
                    n);
  }
}

/// A band becomes intervals where columns have room, so that kernels without positions take it.
TEST(Gather, PositionsOnlyWhereIntervalsHaveNoRoom) {
  const Segments zigzag{{0, 4}, {12, 16}};
  EXPECT_FALSE(gather(masks::causal(16, 16), zigzag, zigzag).has_positions());
  EXPECT_FALSE(gather(masks::sliding_window(16, 16, 5, 2), zigzag, zigzag).has_positions());
  MaskParts parts{.seqlen_q = 16, .seqlen_k = 16, .band = Band::causal(), .lts = std::vector<int32_t>(16, 9)};
  EXPECT_EQ(gather(Mask(parts), zigzag, zigzag).num_intervals(), 2);
  parts.lte.assign(16, 12);
  EXPECT_FALSE(gather(Mask(parts), zigzag, zigzag).has_positions());
  parts.band = Band::window(3, 3);
  EXPECT_TRUE(gather(Mask(parts), zigzag, zigzag).has_positions());
  EXPECT_EQ(gather(masks::causal(16, 16), Segments{{4, 8}, {8, 12}}, Segments{{0, 12}}).band(), Band::causal());
}

TEST(Gather, Errors) {
  const Mask mask = masks::causal(10, 20);
  const Segments all{{0, 20}};
  expect_invalid({"row segment [-1, 5)", "[0, 10)"}, [&] { gather(mask, Segments{{-1, 5}}, all); });
  expect_invalid({"row segment [6, 5)", "[0, 10)"}, [&] { gather(mask, Segments{{6, 5}}, all); });
  expect_invalid({"row segment [2, 5)", "before 4", "ascend"}, [&] { gather(mask, Segments{{0, 4}, {2, 5}}, all); });
  expect_invalid({"key segment [0, 21)", "[0, 20)"}, [&] { gather(mask, {}, Segments{{0, 21}}); });
  const Mask blocked({.seqlen_q = 300, .seqlen_k = 300, .block_mask = std::vector<uint8_t>(9, 1)});
  const Segments blocks{{0, 128}, {256, 300}};
  EXPECT_EQ(gather(blocked, blocks, blocks).seqlen_q(), 172);
  expect_error(ErrorCode::kUnsupported, {"row segment [0, 100)", "block mask", "128"},
               [&] { gather(blocked, Segments{{0, 100}, {128, 300}}, blocks); });
  expect_error(ErrorCode::kUnsupported, {"key segment [1, 128)", "block mask", "128"},
               [&] { gather(blocked, blocks, Segments{{1, 128}}); });
}

}  // namespace
}  // namespace flashmask::test
