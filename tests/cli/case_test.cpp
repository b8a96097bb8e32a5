// SPDX-License-Identifier: Apache-2.0
// Cases of `flashmask verify`: as text, as masks, as tensors.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "families/families.h"
#include "support/independent_rule.h"
#include "verify/any_case.h"
#include "verify/cached_cases.h"
#include "verify/case_masks.h"
#include "verify/covering_cases.h"
#include "verify/problem.h"
#include "verify/random_cases.h"

namespace flashmask::verify {
namespace {

std::vector<std::string> all_families() {
  std::vector<std::string> names{std::string(kNoMask), std::string(kRandomMatrix)};
  for (const Family& family : families()) names.emplace_back(family.name);
  return names;
}

Case small_case(const std::string& family) {
  Case c{.batch = 2, .seqlen_q = 37, .seqlen_k = 52, .heads_q = 6, .heads_kv = 2, .head_dim = 8, .head_dim_v = 8};
  c.family = family;
  c.seed = 11;
  return c;
}

TEST(CaseText, ReadsBackWhatItWrites) {
  for (int64_t n = 0; n < 500; ++n) {
    const Case c = random_case(1, n, all_families());
    EXPECT_EQ(parse_case(describe(c)), c) << describe(c);
  }
}

TEST(CaseText, WhatIsLeftOutHasItsDefault) {
  Case expected;
  expected.batch = 3;
  EXPECT_EQ(parse_case("  batch=3\n"), expected);
  EXPECT_EQ(parse_case(""), Case());
}

TEST(CaseText, NamesWhatItDoesNotUnderstand) {
  for (const char* line : {"batch", "batch=", "batch=3x", "batch=-1", "colour=3", "layout=sideways", "window=3",
                           "window=3,-2", "scale=nan", "softcap=inf", "sink=yes", "dropout=half", "positions=yes",
                           "q_offset=1 positions=each", "heads_q=3 heads_kv=2", "seed=-1", "seqlen_q=99999999999"}) {
    EXPECT_THROW(parse_case(line), Error) << line;
  }
}

TEST(CachedCaseText, ReadsBackWhatItWrites) {
  for (int64_t n = 0; n < 500; ++n) {
    const CachedCase c = random_cached_case(1, n);
    EXPECT_EQ(std::get<CachedCase>(parse_any_case(describe(c))), c) << describe(c);
  }
}

TEST(CachedCases, MostAreTakenByTheirBackend) {
  int taken = 0;
  for (int64_t n = 0; n < 500; ++n) {
    const CachedCase c = random_cached_case(1, n, "cuda");
    taken += c.dtype != DataType::kFloat32 && c.head_dim % 8 == 0 && c.head_dim_v % 8 == 0;
  }
  EXPECT_GT(taken, 450);
  EXPECT_LT(taken, 500);
}

TEST(CachedCaseText, NamesWhatItDoesNotUnderstand) {
  for (const char* line :
       {"cache=", "cache=heap", "cache=table keys=1,", "cache=table keys=1,2 rows=1", "cache=table page_size=0",
        "cache=table heads_q=3 heads_kv=2", "cache=table keys=1,2 rows=1,2 packed=no", "cache=table family=causal",
        "cache=table bad=yes shared=4", "cache=table tail=129", "cache=table window=3"}) {
    EXPECT_THROW(parse_any_case(line), Error) << line;
  }
}

TEST(CachedCaseText, CachesAreAKindOfTheirOwn) {
  EXPECT_TRUE(std::holds_alternative<CachedCase>(parse_any_case("seed=1 cache=lists")));
  EXPECT_TRUE(std::holds_alternative<Case>(parse_any_case("family=causal seed=1")));
}

TEST(CachedCases, CoverWhatACacheMayBe) {
  const std::vector<CachedCase> cases = covering_cached_cases();
  EXPECT_GE(cases.size(), 36u);
  const auto any = [&](const auto& holds) { return std::ranges::any_of(cases, holds); };
  for (const int64_t size : {1, 3, 16, 64, 128})
    EXPECT_TRUE(any([&](const CachedCase& c) { return c.has_tables() && c.page_size == size; })) << size;
  for (const ScaleShape shape :
       {ScaleShape::kTensor, ScaleShape::kHead, ScaleShape::kPage, ScaleShape::kToken, ScaleShape::kTokenHead}) {
    EXPECT_TRUE(any([&](const CachedCase& c) { return c.k_scale == shape; }));
    EXPECT_TRUE(any([&](const CachedCase& c) { return c.v_scale == shape; }));
  }
  for (const int64_t vectors : {1, 2, 4})
    EXPECT_TRUE(any([&](const CachedCase& c) { return c.vectors == vectors && c.vectors_by_head; })) << vectors;
  EXPECT_TRUE(any([](const CachedCase& c) { return c.group_size() == 16; }));
  EXPECT_TRUE(any([](const CachedCase& c) { return c.tail > 32 && c.tail_depth && c.window.left >= 0; }));
  EXPECT_TRUE(any([](const CachedCase& c) { return c.tail > 0 && c.positions == CachedPositions::kRowsAndKeys; }));
  EXPECT_TRUE(any([](const CachedCase& c) { return c.bad && c.tables == CacheTables::kLists; }));
  EXPECT_TRUE(any([](const CachedCase& c) { return c.shared_keys() > 0 && c.batch() > 1; }));
}

TEST(CachedCases, AskDevicesForEqualBits) {
  for (const CachedCase& c : covering_cached_cases()) EXPECT_FALSE(c.batch_invariant);
  const std::vector<CachedCase> cases = covering_cached_cases("cuda");
  const auto count = std::ranges::count_if(cases, [](const CachedCase& c) { return c.batch_invariant; });
  EXPECT_GT(count, 10);
  EXPECT_LT(count, static_cast<int64_t>(cases.size()) - 10);
}

TEST(CaseMask, HasTheLengthsAndCountsOfTheCase) {
  for (const std::string& family : all_families()) {
    SCOPED_TRACE(family);
    Case c = small_case(family);
    for (const MaskHeads heads : {MaskHeads::kOne, MaskHeads::kKv, MaskHeads::kQuery}) {
      c.mask_heads = heads;
      c.mask_per_batch = heads != MaskHeads::kOne;
      const Mask mask = make_mask(c);
      EXPECT_EQ(mask.seqlen_q(), 37);
      EXPECT_EQ(mask.seqlen_k(), 52);
      EXPECT_TRUE(mask.heads() == 1 || mask.heads() == c.mask_head_count());
      EXPECT_TRUE(mask.batch() == 1 || mask.batch() == c.mask_batch_count());
      EXPECT_EQ(make_mask(c).view().content_hash, mask.view().content_hash);
    }
  }
}

TEST(CaseMask, RandomMatricesMostlyHaveLists) {
  int64_t lists = 0;
  for (uint64_t seed = 0; seed < 40; ++seed) {
    Case c = small_case(std::string(kRandomMatrix));
    c.seed = seed;
    const Mask mask = make_mask(parse_case(describe(c)));
    EXPECT_EQ(mask.view().content_hash, make_mask(c).view().content_hash);
    lists += mask.has_interval_lists();
  }
  EXPECT_GT(lists, 15);
}

TEST(CaseMask, ABandComparesThePositions) {
  for (const char* family : {"causal", "document", "sliding_window"}) {
    SCOPED_TRACE(family);
    Case c = small_case(family);
    const Mask without = make_mask(c);
    for (const Positions positions : {Positions::kShared, Positions::kEach}) {
      c.features.positions = positions;
      const Mask with = make_mask(c);
      EXPECT_TRUE(with.has_positions());
      EXPECT_EQ(with.batch(), positions == Positions::kEach ? c.batch : 1);
      EXPECT_NE(with.band(), Band::none());
      EXPECT_TRUE(without.band() == Band::none() || with.band() == without.band());
      EXPECT_NE(to_dense(with), to_dense(without)) << "positions say nothing";
    }
  }
}

TEST(CaseMask, StackedHeadsAreTheirOwnDraws) {
  for (const std::string& family : all_families()) {
    SCOPED_TRACE(family);
    Case c = small_case(family);
    c.mask_heads = MaskHeads::kQuery;
    c.mask_per_batch = true;
    const Mask mask = make_mask(c);
    const auto dense = test::dense_by_rule(test::parts_of(mask), c.batch, c.heads_q);
    for (int64_t b = 0; b < c.batch; ++b) {
      for (int64_t h = 0; h < c.heads_q; ++h) {
        const int64_t own_b = mask.batch() == 1 ? 0 : b, own_h = mask.heads() == 1 ? 0 : h;
        for (int64_t at = 0; at < 37 * 52; ++at) {
          ASSERT_EQ(dense[static_cast<std::size_t>((b * c.heads_q + h) * 37 * 52 + at)] != 0,
                    mask.visible(own_b, own_h, at / 52, at % 52));
        }
      }
    }
  }
}

TEST(CaseMask, CropsASquareToItsLastRowsAndFirstKeys) {
  Case c = small_case("causal_document");
  const FamilyParameters parameters = draw_parameters(c, 0, 0);
  const Mask square = make_family("causal_document", 52, parameters), mask = make_mask(c);
  for (int64_t i = 0; i < 37; ++i) {
    for (int64_t j = 0; j < 52; ++j) ASSERT_EQ(mask.visible(0, 0, i, j), square.visible(0, 0, i + 15, j));
  }
  std::swap(c.seqlen_q, c.seqlen_k);
  const Mask tall = make_mask(c);
  for (int64_t i = 0; i < 52; ++i) {
    for (int64_t j = 0; j < 37; ++j) ASSERT_EQ(tall.visible(0, 0, i, j), square.visible(0, 0, i, j));
  }
}

TEST(CaseMask, TheWindowIsIntersected) {
  for (const char* family : {"causal", "document", "sliding_window"}) {
    Case c = small_case(family);
    const Mask without = make_mask(c);
    c.window = Window{5, 3};
    const Mask with = make_mask(c);
    for (int64_t i = 0; i < 37; ++i) {
      const int64_t position = i + without.q_offset();
      for (int64_t j = 0; j < 52; ++j) {
        ASSERT_EQ(with.visible(0, 0, i, j), without.visible(0, 0, i, j) && position - 5 <= j && j <= position + 3)
            << family << " " << i << " " << j;
      }
    }
  }
}

TEST(CaseMask, TheBlockMaskIsLaidOver) {
  Case c = small_case("causal");
  c.seqlen_q = 300;
  c.seqlen_k = 200;
  const Mask without = make_mask(c);
  c.block_mask = BlockMask::kEach;
  const Mask with = make_mask(c);
  const BlockGrid grid = draw_block_mask(c);
  ASSERT_EQ(grid.keep.size(), static_cast<std::size_t>(2 * 6 * 3 * 2));
  ASSERT_EQ(with.heads(), 6);
  for (int64_t m = 0; m < 12; ++m) {
    for (int64_t i = 0; i < 300; i += 7) {
      for (int64_t j = 0; j < 200; j += 3) {
        const bool kept = grid.keep[static_cast<std::size_t>((m * 3 + i / 128) * 2 + j / 128)] != 0;
        ASSERT_EQ(with.visible(m / 6, m % 6, i, j), kept && without.visible(0, 0, i, j));
      }
    }
  }
}

TEST(CaseTensors, AreStandardNormalAndSeeded) {
  Case c = small_case("full");
  c.seqlen_q = 400;
  const HeadArray q = Problem(c).q.values();
  double sum = 0, squares = 0;
  for (const double value : q.values) {
    sum += value;
    squares += value * value;
  }
  const auto count = static_cast<double>(q.values.size());
  EXPECT_NEAR(sum / count, 0, 0.03);
  EXPECT_NEAR(squares / count, 1, 0.03);
  EXPECT_EQ(Problem(c).q.values().values, q.values);
  c.seed = 12;
  EXPECT_NE(Problem(c).q.values().values, q.values);
}

TEST(CaseTensors, EveryLayoutHoldsTheSameValues) {
  Case c = small_case("full");
  for (const DataType dtype : {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16}) {
    c.dtype = dtype;
    c.layout = Layout::kBshd;
    const Problem bshd(c);
    c.layout = Layout::kBhsd;
    const Problem bhsd(c);
    c.layout = Layout::kPadded;
    const Problem padded(c);
    EXPECT_EQ(bhsd.q.values().values, bshd.q.values().values);
    EXPECT_EQ(padded.q.values().values, bshd.q.values().values);
    EXPECT_EQ(bhsd.q.view().stride[1], c.head_dim);
    EXPECT_GT(padded.q.view().stride[2], c.head_dim);
  }
}

TEST(CaseTensors, OutputsBeginAsNaNEverywhere) {
  Case c = small_case("full");
  c.dtype = DataType::kFloat16;
  c.layout = Layout::kPadded;
  const Outputs outputs(c);
  for (const Tensor* tensor : {&outputs.out, &outputs.lse, &outputs.dq, &outputs.dk, &outputs.dv}) {
    for (const double value : tensor->values().values) ASSERT_TRUE(std::isnan(value));
    EXPECT_TRUE(tensor->gaps_intact());
  }
}

TEST(CaseTensors, AnExpandedTensorIsOneNumber) {
  Case c = small_case("full");
  c.expanded_dout = true;
  const Problem problem(c);
  const HeadArray dout = problem.dout.values();
  EXPECT_EQ(dout.values.size(), static_cast<std::size_t>(2 * 6 * 37 * 8));
  for (const double value : dout.values) ASSERT_EQ(value, dout.values[0]);
}

TEST(Cases, RandomOnesVaryInEverything) {
  int64_t odd = 0, unequal = 0, grouped = 0, other_dim = 0, empty = 0, window = 0, offset = 0, blocks = 0, dlse = 0;
  for (int64_t n = 0; n < 400; ++n) {
    const Case c = random_case(7, n, all_families());
    odd += c.seqlen_q % 2;
    unequal += c.seqlen_q != c.seqlen_k;
    grouped += c.heads_q != c.heads_kv;
    other_dim += c.head_dim != c.head_dim_v;
    empty += c.seqlen_q == 0 || c.seqlen_k == 0;
    window += c.window.has_value();
    offset += c.q_offset.has_value();
    blocks += c.block_mask != BlockMask::kNone;
    dlse += c.dlse;
    EXPECT_GE(c.head_dim, 8);
    EXPECT_LE(c.head_dim, 256);
  }
  for (const int64_t count : {odd, unequal, grouped, other_dim, window, offset, blocks, dlse}) EXPECT_GT(count, 40);
  EXPECT_GT(empty, 0);
}

TEST(Cases, TheCoveringListNeverChanges) {
  const std::vector<Case> first = covering_cases(), second = covering_cases();
  EXPECT_EQ(first, second);
  EXPECT_GE(first.size(), 1500u);
}

}  // namespace
}  // namespace flashmask::verify
