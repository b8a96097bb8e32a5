// SPDX-License-Identifier: Apache-2.0
// The Mask itself: what it stores, its views, its hash, its with_... functions and validate().
#include "flashmask/mask.h"

#include <gtest/gtest.h>

#include <set>
#include <thread>

#include "flashmask/builders.h"
#include "flashmask/draw.h"
#include "flashmask/inspect.h"
#include "support/extent.h"
#include "support/independent_rule.h"
#include "support/random_masks.h"

namespace flashmask::test {
namespace {

using Vector = std::vector<int32_t>;

TEST(Mask, KeepsWhatItWasGiven) {
  const Mask mask({.seqlen_q = 3,
                   .seqlen_k = 2,
                   .band = Band::window(1, 0),
                   .q_offset = 5,
                   .batch = 2,
                   .heads = 1,
                   .lts = {1, 2, 3, 9},
                   .uts = {-1, 0, 0, 1},
                   .block_heads = 3,
                   .block_mask = {1, 0, 7}});
  EXPECT_EQ(mask.seqlen_q(), 3);
  EXPECT_EQ(mask.seqlen_k(), 2);
  EXPECT_EQ(mask.batch(), 2);
  EXPECT_EQ(mask.heads(), 3);
  EXPECT_EQ(mask.band(), (Band{.lo = -1, .hi = 0}));
  EXPECT_EQ(mask.q_offset(), 5);
  EXPECT_EQ(mask.num_intervals(), 2);
  EXPECT_TRUE(mask.has_block_mask());
  EXPECT_EQ(Vector(mask.lts().begin(), mask.lts().end()), (Vector{1, 2, 3, 9}));
  EXPECT_TRUE(mask.lte().empty());
  EXPECT_EQ(Vector(mask.uts().begin(), mask.uts().end()), (Vector{-1, 0, 0, 1}));
  EXPECT_TRUE(mask.ute().empty());
  EXPECT_EQ(std::vector<uint8_t>(mask.block_mask().begin(), mask.block_mask().end()), (std::vector<uint8_t>{1, 0, 7}));
  EXPECT_EQ(mask.memory_bytes(), 8 * 4 + 3);
}

TEST(Mask, ViewShowsTheSame) {
  const Mask mask({.seqlen_q = 3,
                   .seqlen_k = 2,
                   .band = Band::window(1, 0),
                   .q_offset = 5,
                   .heads = 2,
                   .lts = {1, 2, 3, 3},
                   .block_batch = 2,
                   .block_mask = {1, 0}});
  const MaskView& view = mask.view();
  EXPECT_EQ(view.seqlen_q, 3);
  EXPECT_EQ(view.seqlen_k, 2);
  EXPECT_EQ(view.diagonal_lo, 4);
  EXPECT_EQ(view.diagonal_hi, 5);
  EXPECT_EQ(view.bounds_batch, 1);
  EXPECT_EQ(view.bounds_heads, 2);
  EXPECT_EQ(view.block_batch, 2);
  EXPECT_EQ(view.block_heads, 1);
  EXPECT_EQ(view.batch(), 2);
  EXPECT_EQ(view.heads(), 2);
  EXPECT_EQ(view.lts, mask.lts().data());
  EXPECT_EQ(view.lte, nullptr);
  EXPECT_EQ(view.uts, nullptr);
  EXPECT_EQ(view.ute, nullptr);
  EXPECT_EQ(view.block_mask, mask.block_mask().data());
  EXPECT_EQ(view.device, Device{});
}

TEST(Mask, OffsetDefaultsToBottomRight) {
  EXPECT_EQ(Mask({.seqlen_q = 3, .seqlen_k = 8}).q_offset(), 5);
  EXPECT_EQ(Mask({.seqlen_q = 8, .seqlen_k = 3}).q_offset(), -5);
  EXPECT_EQ(Mask({.seqlen_q = 8, .seqlen_k = 3, .q_offset = 0}).q_offset(), 0);
}

TEST(Mask, WithoutVectorsItIsOneMask) {
  const Mask mask({.seqlen_q = 3, .seqlen_k = 8, .batch = 4, .heads = 2});
  EXPECT_EQ(mask.batch(), 1);
  EXPECT_EQ(mask.heads(), 1);
  EXPECT_EQ(mask.num_intervals(), 0);
  EXPECT_EQ(mask.memory_bytes(), 0);
}

TEST(Mask, AbsentEdgesOfAPair) {
  // A missing start is row 0, a missing end seqlen_q, in either pair.
  for (const bool second : {false, true}) {
    MaskParts start{.seqlen_q = 4, .seqlen_k = 1}, end = start;
    (second ? start.uts : start.lts) = {3};
    (second ? end.ute : end.lte) = {3};
    EXPECT_EQ(to_dense(Mask(start)), (std::vector<uint8_t>{1, 1, 1, 0}));
    EXPECT_EQ(to_dense(Mask(end)), (std::vector<uint8_t>{0, 0, 0, 1}));
    EXPECT_EQ(Mask(start).num_intervals(), 1);
    EXPECT_EQ(Mask(end).num_intervals(), 1);
  }
}

TEST(Mask, ExtremeValuesAreClamped) {
  const Mask mask({.seqlen_q = 3,
                   .seqlen_k = 4,
                   .lts = {INT32_MIN, INT32_MAX, 1, INT32_MAX},
                   .lte = {INT32_MAX, INT32_MIN, INT32_MAX, INT32_MAX},
                   .uts = {0, INT32_MIN, 3, INT32_MIN},
                   .ute = {0, 1, 3, INT32_MIN}});
  EXPECT_EQ(to_dense(mask), (std::vector<uint8_t>{0, 0, 1, 1, 0, 1, 0, 1, 0, 1, 0, 1}));
}

TEST(Mask, BandsFarOutside) {
  // Edges and offsets far beyond int32 saturate: they hide everything or nothing.
  constexpr int64_t kFar = int64_t{1} << 40;
  const auto visible = [](Band band, int64_t q_offset) {
    const auto dense = to_dense(Mask({.seqlen_q = 2, .seqlen_k = 2, .band = band, .q_offset = q_offset}));
    return static_cast<int>(dense[0] + dense[1] + dense[2] + dense[3]);
  };
  EXPECT_EQ(visible({.lo = std::nullopt, .hi = kFar}, 0), 4);
  EXPECT_EQ(visible({.lo = std::nullopt, .hi = -kFar}, 0), 0);
  EXPECT_EQ(visible({.lo = -kFar, .hi = std::nullopt}, 0), 4);
  EXPECT_EQ(visible({.lo = kFar, .hi = std::nullopt}, 0), 0);
  EXPECT_EQ(visible(Band::causal(), kFar), 4);
  EXPECT_EQ(visible(Band::causal(), -kFar), 0);
  EXPECT_EQ(visible(Band::window(1, 1), kFar), 0);
  EXPECT_EQ(visible({.lo = -kFar, .hi = -kFar}, kFar), 2);
  EXPECT_EQ(visible({.lo = std::nullopt, .hi = int64_t{INT32_MAX}}, 0), 4);
  EXPECT_EQ(visible({.lo = std::nullopt, .hi = int64_t{INT32_MIN}}, 0), 0);
  EXPECT_EQ(visible({.lo = int64_t{INT32_MIN}, .hi = std::nullopt}, 0), 4);
}

TEST(Mask, LongestSequences) {
  // Nothing of size seqlen_k is stored, so the largest lengths are cheap, and the corners must not overflow.
  const Mask mask({.seqlen_q = kMaxSeqlen, .seqlen_k = kMaxSeqlen, .band = Band::window(0, 0)});
  EXPECT_TRUE(mask.visible(0, 0, 0, 0));
  EXPECT_TRUE(mask.visible(0, 0, kMaxSeqlen - 1, kMaxSeqlen - 1));
  EXPECT_FALSE(mask.visible(0, 0, kMaxSeqlen - 1, kMaxSeqlen - 2));
  EXPECT_FALSE(mask.visible(0, 0, 0, kMaxSeqlen - 1));
  EXPECT_FALSE(mask.visible(0, 0, kMaxSeqlen - 1, 0));
  const Mask row({.seqlen_q = 1, .seqlen_k = kMaxSeqlen, .band = Band::causal()});
  EXPECT_TRUE(row.visible(0, 0, 0, kMaxSeqlen - 1));
  const Mask column({.seqlen_q = kMaxSeqlen, .seqlen_k = 1, .band = Band::causal(), .lts = {INT32_MAX}});
  EXPECT_TRUE(column.visible(0, 0, kMaxSeqlen - 1, 0));
  EXPECT_FALSE(column.visible(0, 0, kMaxSeqlen - 2, 0));
}

TEST(Mask, LongestSequencesAtTheEndsOfTheOffset) {
  constexpr int64_t k40 = int64_t{1} << 40;
  const int64_t bottom_right = 2 - kMaxSeqlen;
  for (const auto& [q_offset, visible] :
       {std::pair<int64_t, int64_t>{-k40, 0}, {bottom_right, 3}, {0, 2 * kMaxSeqlen - 1}, {k40, 2 * kMaxSeqlen}}) {
    SCOPED_TRACE(q_offset);
    const Mask mask({.seqlen_q = kMaxSeqlen, .seqlen_k = 2, .band = Band::causal(), .q_offset = q_offset});
    EXPECT_EQ(statistics(mask).visible, visible);
    EXPECT_EQ(statistics(mask, {kMaxSeqlen, kMaxSeqlen}).visible, visible);
    EXPECT_EQ(to_startend_row_indices(mask).seqlen_k, 2);
  }
  const Mask last_rows({.seqlen_q = kMaxSeqlen, .seqlen_k = 2, .band = Band::causal()});
  EXPECT_NE(draw_text(last_rows).find("2,147,483,645"), std::string::npos);
}

TEST(Mask, InfiniteBandsAreUnbounded) {
  for (const int64_t reach : {int64_t{INT64_MAX}, INT64_MAX - 1, int64_t{1} << 62}) {
    const Mask mask({.seqlen_q = 3, .seqlen_k = 2, .band = Band::window(reach, reach)});
    EXPECT_TRUE(mask.band().unbounded()) << reach;
    EXPECT_EQ(mask.view().content_hash, Mask({.seqlen_q = 3, .seqlen_k = 2}).view().content_hash);
    EXPECT_EQ(mask.with_band(Band::window(reach, 0)).band(), Band::causal());
  }
}

TEST(Mask, BandsAreExactAtEveryDistance) {
  constexpr int64_t k40 = int64_t{1} << 40, k41 = 2 * k40;
  std::vector<std::optional<int64_t>> edges{std::nullopt};
  for (const int64_t edge : {int64_t{0}, k40, k41, int64_t{1} << 62, int64_t{INT64_MAX}}) {
    for (const int64_t near : {-1, 0, 1}) {
      if (edge < INT64_MAX || near <= 0) edges.insert(edges.end(), {edge + near, -(edge + near)});
    }
  }
  edges.push_back(INT64_MIN);
  for (const int64_t q_offset : {-k40, -k40 + 1, int64_t{0}, k40 - 1, k40}) {
    for (const auto& lo : edges) {
      for (const auto& hi : edges) {
        const MaskParts parts{.seqlen_q = 2, .seqlen_k = 2, .band = {.lo = lo, .hi = hi}, .q_offset = q_offset};
        const Mask mask(parts);
        ASSERT_EQ(to_dense(mask), dense_by_rule(parts))
            << q_offset << " lo " << lo.value_or(7) << " hi " << hi.value_or(7);
        // Exact under another offset, too: what was left out was unbounded whatever the offset.
        MaskParts moved = parts;
        moved.q_offset = -q_offset;
        ASSERT_EQ(to_dense(mask.with_q_offset(-q_offset)), dense_by_rule(moved));
        ASSERT_EQ(to_dense(intersect(mask, Mask({.seqlen_q = 2, .seqlen_k = 2, .q_offset = -q_offset}))),
                  dense_by_rule(parts));
      }
    }
  }
}

TEST(Mask, BandHelpers) {
  EXPECT_TRUE(Band::none().unbounded());
  EXPECT_FALSE(Band::causal().unbounded());
  EXPECT_EQ(Band::causal(), (Band{.lo = std::nullopt, .hi = 0}));
  EXPECT_EQ(Band::window(-1, -1), Band::none());
  EXPECT_EQ(Band::window(-1, 0), Band::causal());
  EXPECT_EQ(Band::window(3, 2), (Band{.lo = -3, .hi = 2}));
  EXPECT_EQ(Band::window(0, -1), (Band{.lo = 0, .hi = std::nullopt}));
}

TEST(Mask, RandomOnesFollowTheRule) {
  Random random(1);
  for (int64_t n = 0; n < scaled(2000); ++n) {
    MaskParts parts = random_parts(random, random_kind(random), random.integer(0, 40), random.integer(0, 40),
                                   random.integer(1, 3), random.integer(1, 3));
    const Mask mask(parts);
    const std::vector<uint8_t> expected = dense_by_rule(parts, mask.batch(), mask.heads());
    ASSERT_EQ(to_dense(mask), expected) << "case " << n;
    std::size_t at = 0;
    for (int64_t b = 0; b < mask.batch(); ++b) {
      for (int64_t h = 0; h < mask.heads(); ++h) {
        for (int64_t i = 0; i < mask.seqlen_q(); ++i) {
          for (int64_t j = 0; j < mask.seqlen_k(); ++j)
            ASSERT_EQ(mask.visible(b, h, i, j), expected[at++] != 0) << "case " << n;
        }
      }
    }
  }
}

TEST(Mask, BlockMaskAndVectorsBroadcastOverEachOther) {
  Random random(2);
  for (const auto& [bounds_heads, block_heads] : {std::pair{1, 1}, {1, 4}, {4, 1}, {2, 4}, {4, 2}, {3, 3}}) {
    for (const auto& [bounds_batch, block_batch] : {std::pair{1, 1}, {1, 3}, {3, 1}, {2, 2}}) {
      MaskParts parts = random_parts(random, ColumnKind::kFourBounds, 300, 135, bounds_batch, bounds_heads);
      draw_block_mask(random, block_batch, block_heads, parts);
      const Mask mask(parts);
      EXPECT_EQ(mask.batch(), std::max(bounds_batch, block_batch));
      EXPECT_EQ(mask.heads(), std::max(bounds_heads, block_heads));
      EXPECT_TRUE(to_dense(mask) == dense_by_rule(parts))
          << bounds_heads << " " << block_heads << " " << bounds_batch << " " << block_batch;
    }
  }
}

TEST(Mask, WithBandOffsetAndBlockMask) {
  Random random(3);
  for (int n = 0; n < 50; ++n) {
    MaskParts parts = random_parts(random, random_kind(random), random.integer(1, 150), random.integer(1, 150));
    const Mask mask(parts);
    const auto before = to_dense(mask);
    MaskParts changed = parts_of(mask);
    changed.band = random_band(random, 20, 20);
    EXPECT_TRUE(to_dense(mask.with_band(changed.band)) == dense_by_rule(changed));
    changed = parts_of(mask);
    changed.q_offset = random.integer(-20, 20);
    EXPECT_TRUE(to_dense(mask.with_q_offset(*changed.q_offset)) == dense_by_rule(changed));
    EXPECT_EQ(mask.with_q_offset(*changed.q_offset).q_offset(), *changed.q_offset);
    changed = parts_of(mask);
    draw_block_mask(random, 2, 3, changed);
    const Mask blocked = mask.with_block_mask(changed.block_mask, 2, 3);
    EXPECT_TRUE(to_dense(blocked) == dense_by_rule(changed));
    EXPECT_EQ(blocked.lts().data(), mask.lts().data()) << "the vectors are shared, not copied";
    const Mask again = blocked.with_block_mask({});
    EXPECT_FALSE(again.has_block_mask());
    EXPECT_EQ(again.view().content_hash, mask.view().content_hash);
    EXPECT_TRUE(to_dense(mask) == before) << "a mask never changes";
  }
}

TEST(Mask, HashTellsMasksApart) {
  const MaskParts base{.seqlen_q = 5, .seqlen_k = 4, .band = Band::causal(), .lts = {5, 5, 5, 5}, .lte = {5, 5, 5, 5}};
  std::vector<MaskParts> variants{base};
  const auto vary = [&](auto&& change) {
    variants.push_back(base);
    change(variants.back());
  };
  vary([](MaskParts& p) { p.seqlen_q = 6, p.q_offset = -1; });
  vary([](MaskParts& p) { p.band = Band::none(); });
  vary([](MaskParts& p) { p.band = Band::window(2, 0); });
  vary([](MaskParts& p) { p.q_offset = 0; });
  vary([](MaskParts& p) { p.lts = {}; });
  vary([](MaskParts& p) { p.lte = {}; });
  vary([](MaskParts& p) { p.lts.swap(p.uts), p.lte.swap(p.ute); });
  vary([](MaskParts& p) { p.lts.swap(p.uts); });
  for (std::size_t j = 0; j < 4; ++j) {
    vary([j](MaskParts& p) { p.lts[j] = 4; });
    vary([j](MaskParts& p) { p.lte[j] = 4; });
    vary([j](MaskParts& p) { p.uts = {0, 0, 0, 0}, p.ute = {0, 0, 0, 0}, p.uts[j] = 1; });
    vary([j](MaskParts& p) { p.uts = {0, 0, 0, 0}, p.ute = {0, 0, 0, 0}, p.ute[j] = 1; });
  }
  vary([](MaskParts& p) { p.heads = 2, p.seqlen_k = 2; });
  vary([](MaskParts& p) { p.batch = 2, p.seqlen_k = 2, p.q_offset = -1; });
  vary([](MaskParts& p) { p.block_mask = {1}; });
  vary([](MaskParts& p) { p.block_mask = {0}; });
  vary([](MaskParts& p) { p.block_mask = {1, 1}, p.block_heads = 2; });
  vary([](MaskParts& p) { p.block_mask = {1, 1}, p.block_batch = 2; });
  std::set<uint64_t> hashes;
  for (const MaskParts& parts : variants) hashes.insert(Mask(parts).view().content_hash);
  EXPECT_EQ(hashes.size(), variants.size());
  EXPECT_EQ(Mask(base).view().content_hash, Mask(base).view().content_hash);
  EXPECT_EQ(Mask(base).with_band(Band::none()).with_band(Band::causal()).view().content_hash,
            Mask(base).view().content_hash);
}

TEST(Mask, HashOfManyRandomMasksIsUnique) {
  Random random(4);
  std::set<uint64_t> hashes;
  const int64_t masks = scaled(5000);
  for (int64_t n = 0; n < masks; ++n) {
    MaskParts parts{.seqlen_q = 1000, .seqlen_k = 16};
    for (int j = 0; j < 16; ++j) parts.lts.push_back(static_cast<int32_t>(random.integer(0, 1000)));
    hashes.insert(Mask(parts).view().content_hash);
  }
  EXPECT_EQ(static_cast<int64_t>(hashes.size()), masks);
}

TEST(Mask, ValidateReportsOddValues) {
  const Mask mask({.seqlen_q = 10,
                   .seqlen_k = 3,
                   .batch = 2,
                   .heads = 2,
                   .lts = {0, 10, -1, 0, 0, 0, 0, 0, 0, 0, 0, 9},
                   .lte = {10, 10, 5, 0, 11, 0, 0, 0, 0, 0, 0, 8},
                   .ute = {0, 0, 0, 0, 0, 0, 0, 0, 0, 12, 0, 0}});
  const std::vector<Finding> findings = mask.validate();
  ASSERT_EQ(findings.size(), 4u);
  const auto is = [&](std::size_t n, int64_t b, int64_t h, int64_t j, const char* vector, const char* value) {
    EXPECT_EQ(findings[n].batch, b);
    EXPECT_EQ(findings[n].head, h);
    EXPECT_EQ(findings[n].column, j);
    EXPECT_NE(findings[n].what.find(vector), std::string::npos) << findings[n].what;
    EXPECT_NE(findings[n].what.find(value), std::string::npos) << findings[n].what;
  };
  is(0, 0, 0, 2, "LTS", "-1");
  is(1, 0, 1, 1, "LTE", "11");
  is(2, 1, 1, 2, "LTS 9", "LTE 8");
  is(3, 1, 1, 0, "UTE", "12");
  EXPECT_EQ(mask.validate(2).size(), 2u);
  EXPECT_EQ(mask.validate(0).size(), 0u);
  EXPECT_TRUE(masks::causal(5, 5).validate().empty());
}

TEST(Mask, IsReadFromManyThreads) {
  Random random(5);
  const Mask mask(random_parts(random, ColumnKind::kFourBounds, 64, 64, 2, 2));
  const auto expected = to_dense(mask);
  std::vector<int> equal(4);
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < equal.size(); ++t) {
    threads.emplace_back([copy = mask, &expected, &equal, t] {
      equal[t] = to_dense(copy) == expected &&
                 from_dense(TensorView::contiguous(expected.data(), DataType::kBool, {4, 1, 64, 64})).heads() == 1;
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(equal, (std::vector<int>{1, 1, 1, 1}));
}

}  // namespace
}  // namespace flashmask::test
