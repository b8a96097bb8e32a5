// SPDX-License-Identifier: Apache-2.0
// The plan: its bits, counts and orders against looking at every element, its views and its errors.
#include "flashmask/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <thread>

#include "families/families.h"
#include "flashmask/builders.h"
#include "support/brute_force.h"
#include "support/expect_error.h"
#include "support/extent.h"
#include "support/independent_rule.h"
#include "support/random_masks.h"

namespace flashmask::test {
namespace {

constexpr TileShape kGranule{kGranuleRows, kGranuleKeys};

/// Largest count first, equal ones in ascending order.
std::vector<int32_t> sorted_by_count(const std::vector<int32_t>& counts) {
  std::vector<int32_t> order(counts.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return counts[static_cast<std::size_t>(a)] > counts[static_cast<std::size_t>(b)];
  });
  return order;
}

std::vector<int32_t> copy(std::span<const int32_t> values) { return {values.begin(), values.end()}; }

/// Everything a plan says about mask index `m`, against the classes of its granules.
void expect_plan_mask(const PlanView& plan, int64_t m, const std::vector<TileClass>& granules,
                      const std::string& what) {
  const PlanLayout& layout = plan.layout();
  const auto at = [&](int64_t r, int64_t c) { return granules[static_cast<std::size_t>(r * layout.key_blocks + c)]; };
  std::vector<int32_t> row_counts(static_cast<std::size_t>(layout.row_granules)),
      key_counts(static_cast<std::size_t>(layout.key_blocks));
  for (int64_t r = 0; r < layout.row_granules; ++r) {
    const auto live = plan.row_live(m, r), full = plan.row_full(m, r);
    ASSERT_EQ(static_cast<int64_t>(live.size()), layout.words_per_row) << what;
    for (int64_t c = 0; c < layout.words_per_row * 64; ++c) {
      const bool exists = c < layout.key_blocks;
      ASSERT_EQ((live[static_cast<std::size_t>(c / 64)] >> (c % 64) & 1) != 0, exists && at(r, c) != TileClass::kEmpty)
          << what << " row bits (" << r << ", " << c << ")";
      ASSERT_EQ((full[static_cast<std::size_t>(c / 64)] >> (c % 64) & 1) != 0, exists && at(r, c) == TileClass::kFull)
          << what << " row bits (" << r << ", " << c << ")";
      if (!exists) continue;
      ASSERT_EQ(plan.granule(m, r, c), at(r, c)) << what;
      row_counts[static_cast<std::size_t>(r)] += at(r, c) != TileClass::kEmpty;
      key_counts[static_cast<std::size_t>(c)] += at(r, c) != TileClass::kEmpty;
    }
  }
  for (int64_t c = 0; c < layout.key_blocks; ++c) {
    const auto live = plan.key_live(m, c), full = plan.key_full(m, c);
    ASSERT_EQ(static_cast<int64_t>(live.size()), layout.words_per_key) << what;
    for (int64_t r = 0; r < layout.words_per_key * 64; ++r) {
      const bool exists = r < layout.row_granules;
      ASSERT_EQ((live[static_cast<std::size_t>(r / 64)] >> (r % 64) & 1) != 0, exists && at(r, c) != TileClass::kEmpty)
          << what << " key bits (" << r << ", " << c << ")";
      ASSERT_EQ((full[static_cast<std::size_t>(r / 64)] >> (r % 64) & 1) != 0, exists && at(r, c) == TileClass::kFull)
          << what << " key bits (" << r << ", " << c << ")";
    }
  }
  ASSERT_EQ(copy(plan.row_counts(m)), row_counts) << what;
  ASSERT_EQ(copy(plan.key_counts(m)), key_counts) << what;
  ASSERT_EQ(copy(plan.key_order(m)), sorted_by_count(key_counts)) << what;
}

/// The most runs of a line of row granules or key blocks, live or full, of a mask's granules.
int64_t most_runs(const PlanLayout& layout, const std::vector<TileClass>& granules) {
  int64_t most = 0;
  const auto count = [&](int64_t lines, int64_t length, auto&& at) {
    for (int64_t line = 0; line < lines; ++line) {
      for (const TileClass least : {TileClass::kPartial, TileClass::kFull}) {
        const auto is_in = [&](int64_t n) {
          return at(line, n) == TileClass::kFull || (least == TileClass::kPartial && at(line, n) == least);
        };
        int64_t runs = 0;
        for (int64_t n = 0; n < length; ++n) runs += is_in(n) && (n == 0 || !is_in(n - 1));
        most = std::max(most, runs);
      }
    }
  };
  const auto at = [&](int64_t r, int64_t c) { return granules[static_cast<std::size_t>(r * layout.key_blocks + c)]; };
  count(layout.row_granules, layout.key_blocks, at);
  count(layout.key_blocks, layout.row_granules, [&](int64_t c, int64_t r) { return at(r, c); });
  return most;
}

void expect_view(const PlanView& view, const Mask& mask, const std::vector<uint8_t>& dense, const std::string& what) {
  ASSERT_TRUE(view.defined());
  ASSERT_EQ(view.mask_hash(), mask.view().content_hash) << what;
  ASSERT_EQ(view.layout().batch, mask.batch()) << what;
  ASSERT_EQ(view.layout().heads, mask.heads()) << what;
  ASSERT_EQ(view.layout().row_granules, (mask.seqlen_q() + 63) / 64) << what;
  ASSERT_EQ(view.layout().key_blocks, (mask.seqlen_k() + 127) / 128) << what;
  int64_t live = 0;
  for (int64_t m = 0; m < mask.batch() * mask.heads(); ++m) {
    const auto granules = classes_of(matrix(dense, m, mask.seqlen_q(), mask.seqlen_k()), kGranule);
    live += std::count_if(granules.begin(), granules.end(), [](TileClass c) { return c != TileClass::kEmpty; });
    expect_plan_mask(view, m, granules, what + ", mask " + std::to_string(m));
    if (testing::Test::HasFatalFailure()) return;
  }
  ASSERT_EQ(view.live_granules(), live) << what;
  for (int64_t b = 0; b < mask.batch(); ++b)
    ASSERT_EQ(view.extent(b), extent_of(dense, b, mask.heads(), mask.seqlen_q(), mask.seqlen_k())) << what;
}

PlanLayout layout_of(const Mask& mask, PlanForm form) {
  return {mask.seqlen_q(), mask.seqlen_k(), mask.batch(), mask.heads(), kNoBits, form};
}

/// In bits and in runs, which are refused where a line has too many.
void expect_plan(const Mask& mask, const std::vector<uint8_t>& dense, const std::string& what) {
  expect_view(Plan(mask.view(), layout_of(mask, PlanForm::kBits)).view(), mask, dense, what);
  if (testing::Test::HasFatalFailure()) return;
  const PlanLayout runs = layout_of(mask, PlanForm::kRuns);
  int64_t most = 0;
  for (int64_t m = 0; m < mask.batch() * mask.heads(); ++m)
    most = std::max(most, most_runs(runs, classes_of(matrix(dense, m, mask.seqlen_q(), mask.seqlen_k()), kGranule)));
  if (most <= kLineRuns) {
    expect_view(Plan(mask.view(), runs).view(), mask, dense, what + ", in runs");
  } else {
    expect_invalid({"8 runs", "its mask has lines of more"}, [&] { Plan(mask.view(), runs); });
  }
}

/// Views of the plan at the tile shapes of kernels, against classify_tiles and counting.
void expect_tiled_views(const Mask& mask, const std::string& what) {
  const Plan plan(mask);
  for (const TileShape shape : {TileShape{64, 128}, {128, 128}, {192, 128}, {128, 256}, {192, 384}}) {
    const TiledPlanView tiled(plan.view(), shape);
    ASSERT_EQ(tiled.shape(), shape);
    int64_t live = 0;
    for (int64_t m = 0; m < mask.batch() * mask.heads(); ++m) {
      const TileGrid grid = classify_tiles(mask, m / mask.heads(), m % mask.heads(), shape);
      ASSERT_EQ(tiled.row_tiles(), grid.row_tiles) << what;
      ASSERT_EQ(tiled.key_tiles(), grid.key_tiles) << what;
      std::vector<int32_t> in_row(static_cast<std::size_t>(grid.row_tiles)),
          in_column(static_cast<std::size_t>(grid.key_tiles));
      for (int64_t r = 0; r < grid.row_tiles && grid.key_tiles > 0; ++r) {
        for (int64_t c = 0; c < grid.key_tiles; ++c) {
          ASSERT_EQ(tiled.tile(m, r, c), grid.at(r, c))
              << what << " tile (" << r << ", " << c << ") of " << shape.rows << "x" << shape.keys;
          in_row[static_cast<std::size_t>(r)] += grid.at(r, c) != TileClass::kEmpty;
          in_column[static_cast<std::size_t>(c)] += grid.at(r, c) != TileClass::kEmpty;
        }
      }
      for (int64_t r = 0; r < grid.row_tiles; ++r)
        ASSERT_EQ(tiled.live_in_row(m, r), in_row[static_cast<std::size_t>(r)]) << what;
      for (int64_t c = 0; c < grid.key_tiles; ++c)
        ASSERT_EQ(tiled.live_in_column(m, c), in_column[static_cast<std::size_t>(c)]) << what;
      ASSERT_EQ(tiled.row_order(m), sorted_by_count(in_row)) << what;
      if (shape.keys == kGranuleKeys && shape.rows > kGranuleRows) {  // the plan itself keeps these
        ASSERT_EQ(copy(plan.view().row_tile_counts(m, shape.rows / kGranuleRows)), in_row) << what;
        ASSERT_EQ(copy(plan.view().row_tile_order(m, shape.rows / kGranuleRows)), tiled.row_order(m)) << what;
      }
      ASSERT_EQ(tiled.column_order(m), sorted_by_count(in_column)) << what;
      live = std::accumulate(in_row.begin(), in_row.end(), live);
    }
    ASSERT_EQ(tiled.live_tiles(), live) << what;
  }
}

TEST(Plan, RandomMasks) {
  Random random(1);
  for (int64_t n = 0; n < scaled(200); ++n) {
    const int64_t rows = random.integer(1, 350) * 2 - 1, keys = random.integer(1, 350) * 2 - 1;
    const ColumnKind kind = kAllColumnKinds[static_cast<std::size_t>(n) % std::size(kAllColumnKinds)];
    const MaskParts parts = random_parts(random, kind, rows, keys, random.integer(1, 2), random.integer(1, 2));
    const std::string what = "case " + std::to_string(n) + ", " + std::to_string(rows) + "x" + std::to_string(keys);
    expect_plan(Mask(parts), dense_by_rule(parts), what);
    if (HasFatalFailure()) return;
    expect_tiled_views(Mask(parts), what);
    if (HasFatalFailure()) return;
  }
}

TEST(Plan, BlockMasks) {
  // The block mask has a batch and heads of its own, beside those of the vectors.
  Random random(2);
  for (int64_t n = 0; n < scaled(60); ++n) {
    const int64_t heads = random.integer(1, 2);
    MaskParts parts = random_parts(random, random_kind(random), random.integer(1, 600), random.integer(1, 600),
                                   random.flip() ? 1 : 2, random.flip() ? 1 : heads);
    draw_block_mask(random, random.flip() ? 1 : 2, random.flip() ? 1 : heads * 2, parts);
    const std::string what = "case " + std::to_string(n);
    expect_plan(Mask(parts), dense_by_rule(parts), what);
    if (HasFatalFailure()) return;
    expect_tiled_views(Mask(parts), what);
    if (HasFatalFailure()) return;
  }
}

TEST(Plan, EveryFamily) {
  for (const Family& family : families()) {
    for (const int64_t seqlen : {1, 64, 65, 127, 128, 129, 700}) {
      const Mask mask = make_family(family.name, seqlen, {}, 5);
      const std::string what = std::string(family.name) + " at " + std::to_string(seqlen);
      expect_plan(mask, dense_by_rule(parts_of(mask)), what);
      if (HasFatalFailure()) return;
      expect_tiled_views(mask, what);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(Plan, MoreGranulesThanOneWord) {
  // More than 64 granules in either direction: several words a row, and the transpose in several squares.
  Random random(3);
  for (const auto& [rows, keys] : {std::pair<int64_t, int64_t>{9001, 130}, {70, 17000}, {4500, 8500}}) {
    for (const ColumnKind kind : {ColumnKind::kDocuments, ColumnKind::kEviction}) {
      MaskParts parts = random_parts(random, kind, rows, keys);
      parts.band = Band::causal();
      parts.q_offset.reset();
      expect_plan(Mask(parts), dense_by_rule(parts), std::to_string(rows) + "x" + std::to_string(keys));
      if (HasFatalFailure()) return;
    }
  }
}

TEST(Plan, EmptySides) {
  for (const auto& [q, k] : {std::pair<int64_t, int64_t>{0, 0}, {0, 300}, {300, 0}}) {
    const Mask mask = masks::causal(q, k);
    expect_plan(mask, {}, "empty");
    expect_tiled_views(mask, "empty");
    EXPECT_EQ(Plan(mask).view().live_granules(), 0);
  }
}

TEST(Plan, ByHand) {
  // A causal document mask of 128 + 64 + 128 tokens: 5 granules of rows, 3 blocks of keys.
  const Plan plan(masks::causal_document(Documents::from_lengths(std::vector<int64_t>{128, 64, 128})));
  using enum TileClass;
  const TileClass expected[5][3] = {{kPartial, kEmpty, kEmpty},
                                    {kPartial, kEmpty, kEmpty},
                                    {kEmpty, kPartial, kEmpty},
                                    {kEmpty, kPartial, kEmpty},
                                    {kEmpty, kPartial, kPartial}};
  for (int64_t r = 0; r < 5; ++r) {
    for (int64_t c = 0; c < 3; ++c) EXPECT_EQ(plan.view().granule(0, r, c), expected[r][c]) << r << " " << c;
  }
  EXPECT_EQ(copy(plan.view().row_counts(0)), (std::vector<int32_t>{1, 1, 1, 1, 2}));
  EXPECT_EQ(copy(plan.view().key_counts(0)), (std::vector<int32_t>{2, 3, 1}));
  EXPECT_EQ(copy(plan.view().key_order(0)), (std::vector<int32_t>{1, 0, 2}));
  EXPECT_EQ(copy(plan.view().row_tile_counts(0, 2)), (std::vector<int32_t>{1, 1, 2}));
  EXPECT_EQ(copy(plan.view().row_tile_order(0, 2)), (std::vector<int32_t>{2, 0, 1}));
  EXPECT_EQ(copy(plan.view().row_tile_counts(0, 3)), (std::vector<int32_t>{2, 2}));
  EXPECT_EQ(copy(plan.view().row_tile_order(0, 3)), (std::vector<int32_t>{0, 1}));
  EXPECT_EQ(plan.view().live_granules(), 6);
  // Causal: the granules below the diagonal are full.
  const Plan causal(masks::causal(256, 256));
  const TileClass triangle[4][2] = {{kPartial, kEmpty}, {kPartial, kEmpty}, {kFull, kPartial}, {kFull, kPartial}};
  for (int64_t r = 0; r < 4; ++r) {
    for (int64_t c = 0; c < 2; ++c) EXPECT_EQ(causal.view().granule(0, r, c), triangle[r][c]) << r << " " << c;
  }
}

TEST(Plan, ForEachLive) {
  const std::vector<uint64_t> live{0x8000000000000005u, 0, 0x2u}, full{0x8000000000000004u, 0, 0};
  std::vector<std::pair<int64_t, bool>> seen;
  for_each_live(GranuleLine(live), GranuleLine(full),
                [&](int64_t index, bool whole) { seen.emplace_back(index, whole); });
  EXPECT_EQ(seen, (std::vector<std::pair<int64_t, bool>>{{0, false}, {2, true}, {63, true}, {129, false}}));
  for_each_live({}, {}, [](int64_t, bool) { FAIL(); });
}

/// A mask whose row granules see every `step`th key block but the first, and the same of keys.
Mask striped(int64_t blocks, int64_t step) {
  MaskParts parts{.seqlen_q = blocks * kBlockMaskSize, .seqlen_k = blocks * kBlockMaskSize};
  for (int64_t n = 0; n < blocks * blocks; ++n)
    parts.block_mask.push_back((n / blocks + n % blocks) % step == step - 1 ? 1 : 0);
  return Mask(parts);
}

TEST(Plan, HasAsManyRunsAsItHasRoomFor) {
  for (const int64_t runs : {7, 8, 9, 20}) {
    for (const int64_t step : {2, 3}) {
      const Mask mask = striped(runs * step, step);
      const PlanLayout layout = layout_of(mask, PlanForm::kRuns);
      if (runs > kLineRuns) {
        expect_invalid({"plan has " + std::to_string(layout.bytes) + " bytes", "its mask has lines of more",
                        "needs " + std::to_string(layout_of(mask, PlanForm::kBits).bytes)},
                       [&] { Plan(mask.view(), layout); });
        continue;
      }
      const Plan plan(mask.view(), layout);
      for (int64_t r = 0; r < layout.row_granules; ++r) {
        for (int64_t c = 0; c < layout.key_blocks; ++c) {
          const bool is_live = (r / 2 + c) % step == step - 1;
          ASSERT_EQ(plan.view().granule(0, r, c), is_live ? TileClass::kFull : TileClass::kEmpty) << r << " " << c;
          ASSERT_EQ(plan.view().key_live(0, c).has(r), is_live) << r << " " << c;
          ASSERT_EQ(plan.view().key_full(0, c).has(r), is_live) << r << " " << c;
        }
      }
    }
  }
}

TEST(Plan, InRunsHasNoBitTiles) {
  expect_invalid({"bit_tiles is 0", "in runs"}, [] { PlanLayout(1, 1, 1, 1, 0, PlanForm::kRuns); });
  const Mask mask = masks::causal(300, 300);
  expect_invalid({"bit tiles", "host memory"}, [&] { Plan(mask.view(), PlanLayout(300, 300, 1, 1, 2)); });
}

TEST(Plan, FillsABufferThatHeldSomethingElse) {
  Random random(4);
  for (int n = 0; n < 20; ++n) {
    const Mask mask(random_parts(random, random_kind(random), random.integer(0, 700), random.integer(0, 700), 2, 2));
    const Plan plan(mask);
    std::vector<uint64_t> words(plan.buffer().size() / 8 + 3, 0xaaaaaaaaaaaaaaaau);
    const auto bytes = std::as_writable_bytes(std::span(words));
    build_plan(mask.view(), bytes);
    const PlanView view(bytes);  // a buffer may be longer than its plan
    ASSERT_TRUE(std::ranges::equal(bytes.first(plan.buffer().size()), plan.buffer())) << "every byte is written";
    EXPECT_EQ(view.mask_hash(), mask.view().content_hash);
    const PlanLayout runs = layout_of(mask, PlanForm::kRuns);
    std::vector<uint64_t> zeros(static_cast<std::size_t>(runs.bytes / 8)), others(zeros.size(), 0xaaaaaaaaaaaaaaaau);
    for (auto* buffer : {&zeros, &others}) build_plan(mask.view(), runs, std::as_writable_bytes(std::span(*buffer)));
    EXPECT_EQ(zeros, others) << "every byte in runs is written";
    for (std::size_t w = plan.buffer().size() / 8; w < words.size(); ++w)
      ASSERT_EQ(words[w], 0xaaaaaaaaaaaaaaaau) << "written past the end";
  }
}

TEST(Plan, InterleavedVectors) {
  // The vectors as FlashMask keeps them, [batch, heads, seqlen_k, n], make the same plan.
  Random random(5);
  for (int n = 0; n < 30; ++n) {
    const MaskParts parts =
        random_parts(random, ColumnKind::kFourBounds, random.integer(1, 500), random.integer(1, 500), 2, 2);
    const Mask mask(parts);
    std::vector<int32_t> interleaved;
    for (std::size_t at = 0; at < parts.lts.size(); ++at) {
      for (const auto* vector : {&parts.lts, &parts.lte, &parts.uts, &parts.ute}) interleaved.push_back((*vector)[at]);
    }
    MaskView view = mask.view();
    view.bounds_stride = 4;
    view.lts = interleaved.data();
    view.lte = interleaved.data() + 1;
    view.uts = interleaved.data() + 2;
    view.ute = interleaved.data() + 3;
    const Plan expected(mask);
    std::vector<uint64_t> words(expected.buffer().size() / 8);
    const auto bytes = std::as_writable_bytes(std::span(words));
    build_plan(view, bytes);
    ASSERT_TRUE(std::ranges::equal(bytes, expected.buffer()));
  }
}

TEST(Plan, MovesWithItsBuffer) {
  const Mask mask = masks::causal(300, 300);
  Plan first(mask);
  const int64_t live = first.view().live_granules();
  Plan second(std::move(first));
  EXPECT_EQ(second.view().live_granules(), live);
  Plan third(masks::full(1, 1));
  third = std::move(second);
  EXPECT_EQ(third.view().live_granules(), live);
  EXPECT_EQ(third.view().layout().seqlen_q, 300);
  EXPECT_EQ(PlanView(third.buffer()).live_granules(), live);
}

TEST(Plan, HashTellsWhichMaskItIsOf) {
  const Mask mask = masks::causal(300, 300);
  const Plan plan(mask);
  EXPECT_EQ(plan.view().mask_hash(), mask.view().content_hash);
  EXPECT_EQ(plan.view().mask_hash(), masks::causal(300, 300).view().content_hash);
  for (const Mask& other : {masks::causal(300, 301), masks::causal(301, 300), masks::full(300, 300),
                            mask.with_q_offset(1), mask.with_band(Band::window(5, 0)),
                            mask.with_block_mask(std::vector<uint8_t>(9, 1)), make_family("causal_document", 300)}) {
    EXPECT_NE(plan.view().mask_hash(), other.view().content_hash);
  }
}

TEST(Plan, OneMaskManyThreads) {
  const Mask mask = make_family("causal_document", 5000, {}, 1);
  const Plan expected(mask);
  std::vector<int> same(4);
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < same.size(); ++t) {
    threads.emplace_back([&, t] {
      const Plan own(mask);
      same[t] = std::ranges::equal(own.buffer(), expected.buffer()) &&
                expected.view().live_granules() == own.view().live_granules();
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(same, (std::vector<int>{1, 1, 1, 1}));
}

// --- Errors -------------------------------------------------------------------------------------------

TEST(PlanErrors, Layout) {
  expect_invalid({"seqlen_q is -1", "between 0 and 2147483647"}, [] { PlanLayout(-1, 1, 1, 1); });
  expect_invalid({"seqlen_q is 2147483648"}, [] { PlanLayout(kMaxSeqlen + 1, 1, 1, 1); });
  expect_invalid({"seqlen_k is -1"}, [] { PlanLayout(1, -1, 1, 1); });
  expect_invalid({"seqlen_k is 9223372036854775807"}, [] { PlanLayout(1, INT64_MAX, 1, 1); });
  expect_invalid({"batch and heads are 0 and 1", "at least 1"}, [] { PlanLayout(1, 1, 0, 1); });
  expect_invalid({"batch and heads are 2 and -1", "at least 1"}, [] { PlanLayout(1, 1, 2, -1); });
  expect_invalid({"batch 1099511627776 and heads 1099511627776 has more than 2^63 bytes", "at most 1099511627776"},
                 [] { PlanLayout(1, 1, int64_t{1} << 40, int64_t{1} << 40); });
  expect_invalid({"batch 1024 and heads 1024 has more than 2^63 bytes"},
                 [] { PlanLayout(kMaxSeqlen, kMaxSeqlen, 1 << 10, 1 << 10); });
}

TEST(PlanErrors, MoreBytesThanAnyMachineHas) {
  constexpr int64_t kLongest = 128 << 20;
  expect_invalid({"seqlen_q 2147483647, seqlen_k 2147483647, batch 1 and heads 1 has 281",
                  "at most 1099511627776 (1 TiB)", "shorter lengths"},
                 [] { PlanLayout(kMaxSeqlen, kMaxSeqlen, 1, 1); });
  expect_invalid({"seqlen_q 134217728, seqlen_k 134217728"}, [] { PlanLayout(kLongest, kLongest, 1, 1); });
  expect_invalid({"batch 8192 and heads 2"}, [] { PlanLayout(kLongest / 128, kLongest / 128, 8192, 2); });
  EXPECT_LE(PlanLayout(kLongest - (64 << 10), kLongest - (64 << 10), 1, 1).bytes, kMaxPlanBytes);
  EXPECT_LT(PlanLayout(1, kMaxSeqlen, 1, 1).bytes, kMaxPlanBytes);
  const Mask longest({.seqlen_q = kMaxSeqlen, .seqlen_k = kMaxSeqlen});
  expect_invalid({"a plan for seqlen_q 2147483647"}, [&] { Plan{longest}; });
}

TEST(PlanErrors, BuildPlan) {
  const Mask mask = masks::causal(300, 300);
  const PlanLayout layout(300, 300, 1, 1);
  std::vector<uint64_t> words(static_cast<std::size_t>(layout.bytes / 8) + 1);
  const auto bytes = std::as_writable_bytes(std::span(words));
  const std::string needed = std::to_string(layout.bytes);
  expect_invalid({"plan buffer has 0 bytes", "needs " + needed}, [&] { build_plan(mask.view(), {}); });
  expect_invalid({"plan buffer has " + std::to_string(layout.bytes - 1) + " bytes", "needs " + needed},
                 [&] { build_plan(mask.view(), bytes.first(static_cast<std::size_t>(layout.bytes - 1))); });
  expect_invalid({"plan buffer", "aligned to 8"}, [&] { build_plan(mask.view(), bytes.subspan(4)); });
  MaskView on_device = mask.view();
  on_device.device = {Device::Kind::kCuda, 0};
  expect_invalid({"mask", "host memory"}, [&] { build_plan(on_device, bytes); });
  EXPECT_NO_THROW(build_plan(mask.view(), bytes.first(static_cast<std::size_t>(layout.bytes))));
}

TEST(PlanErrors, View) {
  const Mask mask = masks::causal(300, 300);
  const Plan plan(mask);
  EXPECT_FALSE(PlanView().defined());
  EXPECT_EQ(PlanView().live_granules(), 0);
  const std::string nothing = "does not hold a plan";
  expect_invalid({"plan", nothing, "build_plan"}, [] { PlanView view{std::span<const std::byte>()}; });
  const std::vector<uint64_t> garbage(1000, 0x0123456789abcdefu);
  expect_invalid({"plan", nothing}, [&] { PlanView view{std::as_bytes(std::span(garbage))}; });
  const std::vector<uint64_t> zeros(1000, 0);
  expect_invalid({"plan", nothing}, [&] { PlanView view{std::as_bytes(std::span(zeros))}; });
  expect_invalid({"plan", nothing}, [&] { PlanView view{plan.buffer().first(40)}; });
  expect_invalid({"the buffer has " + std::to_string(plan.buffer().size() - 8) + " bytes",
                  "needs " + std::to_string(plan.buffer().size())},
                 [&] { PlanView view{plan.buffer().first(plan.buffer().size() - 8)}; });
  std::vector<uint64_t> shifted(plan.buffer().size() / 8 + 1);
  const auto bytes = std::as_writable_bytes(std::span(shifted)).subspan(4, plan.buffer().size());
  std::memcpy(bytes.data(), plan.buffer().data(), plan.buffer().size());
  expect_invalid({"plan", "aligned to 8"}, [&] { PlanView view{bytes}; });
  // A header that was overwritten: the lengths it gives are checked.
  std::vector<uint64_t> broken(plan.buffer().size() / 8);
  std::memcpy(broken.data(), plan.buffer().data(), plan.buffer().size());
  broken[1] = static_cast<uint64_t>(-1);
  expect_invalid({"seqlen_q is -1"}, [&] { PlanView view{std::as_bytes(std::span(broken))}; });
  broken[1] = static_cast<uint64_t>(kMaxSeqlen);
  expect_invalid({"plan", "needs"}, [&] { PlanView view{std::as_bytes(std::span(broken))}; });
}

TEST(PlanErrors, RowTileOrder) {
  const Plan plan(masks::causal(300, 300));
  for (const int64_t granules : {-1, 0, 1, 4}) {
    expect_invalid({"granules_per_tile is " + std::to_string(granules), "2 and of 3"},
                   [&] { plan.view().row_tile_order(0, granules); });
    expect_invalid({"granules_per_tile is " + std::to_string(granules)},
                   [&] { plan.view().row_tile_counts(0, granules); });
  }
}

TEST(PlanErrors, TiledView) {
  const Plan plan(masks::causal(300, 300));
  for (const TileShape shape :
       {TileShape{0, 128}, {63, 128}, {96, 128}, {-64, 128}, {64, 0}, {64, 64}, {64, 200}, {64, -128}}) {
    expect_invalid(
        {"tile is " + std::to_string(shape.rows) + "x" + std::to_string(shape.keys), "multiple of 64 rows and of 128"},
        [&] { TiledPlanView view(plan.view(), shape); });
  }
}

}  // namespace
}  // namespace flashmask::test
