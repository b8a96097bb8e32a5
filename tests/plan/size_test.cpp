// SPDX-License-Identifier: Apache-2.0
// How large masks and plans are, and how long a plan of a million tokens takes.
#include <gtest/gtest.h>
#include <malloc.h>

#include <iostream>
#include <string_view>

#include "families/families.h"
#include "flashmask/builders.h"
#include "flashmask/plan.h"
#include "support/cpu_time.h"
#include "support/expect_error.h"
#include "support/extent.h"
#include "support/random_masks.h"

namespace flashmask::test {
namespace {

constexpr int64_t kThousand = 1024, kMillion = 1024 * 1024;

/// Bytes that the program holds on the heap.
int64_t heap_bytes() {
  const struct mallinfo2 info = mallinfo2();
  return static_cast<int64_t>(info.uordblks + info.hblkhd);
}

TEST(Size, PlanIsAByteForATileAndALinearTerm) {
  // 8 bits for every 128 x 128 tile (two granules, two bits each, two directions), 8 bytes for every granule of
  // rows, every row tile of two and of three granules and every block of keys (a count and a place in the order),
  // 8 more for every block of keys (scratch), and what rounding up to words costs.
  for (const auto& [q, k] : {std::pair<int64_t, int64_t>{128 * kThousand, 128 * kThousand},
                             {128 * kThousand, 8 * kThousand},
                             {8 * kThousand, 128 * kThousand},
                             {kMillion, kMillion}}) {
    for (const int64_t masks : {1, 8}) {
      const PlanLayout layout(q, k, 1, masks);
      const int64_t tiles = (q / 128) * (k / 128),
                    linear = 8 * (q / 64) + 8 * (q / 128) + 8 * (q / 192 + 1) + 16 * (k / 128);
      EXPECT_LE(layout.bytes, masks * (tiles + linear) + 96) << q << " " << k;
    }
  }
  EXPECT_EQ(Plan(masks::full(1, 1)).buffer().size(), static_cast<std::size_t>(PlanLayout(1, 1, 1, 1).bytes));
  const PlanLayout exact(128 * kThousand, 128 * kThousand, 1, 1);
  EXPECT_EQ(exact.words_per_row, 1024 / 64);
  EXPECT_EQ(exact.words_per_key, 2048 / 64);
  EXPECT_EQ(exact.key_live - exact.row_live, 2 * 2048 * 1024 / 8);
}

TEST(Size, PlanOfOddLengthsStaysLinearBeyondTheTiles) {
  Random random(1);
  for (int n = 0; n < 2000; ++n) {
    const int64_t q = random.integer(0, 200000), k = random.integer(0, 200000), batch = random.integer(1, 3),
                  heads = random.integer(1, 5);
    const PlanLayout layout(q, k, batch, heads);
    const int64_t rows = (q + 63) / 64, keys = (k + 127) / 128;
    // A row of bits is at most 63 bits longer than it needs to be.
    const int64_t tiles = ((q + 127) / 128) * keys,
                  linear = (4 + 16) * rows + 8 * (rows / 2 + 1) + 8 * (rows / 3 + 1) + (16 + 16) * keys;
    ASSERT_LE(layout.bytes, batch * heads * (tiles + linear) + 128) << q << " " << k;
    ASSERT_EQ(layout.bytes % 8, 0);
  }
}

TEST(Size, LayoutPartsDoNotOverlap) {
  Random random(2);
  for (int n = 0; n < 500; ++n) {
    const int64_t tiles = random.integer(-1, 5);
    const PlanLayout l(random.integer(0, 5000), random.integer(0, 5000), random.integer(1, 3), random.integer(1, 3),
                       tiles, tiles == kNoBits && random.flip() ? PlanForm::kRuns : PlanForm::kBits);
    const int64_t of_row = l.in_runs() ? 8 : l.words_per_row, of_key = l.in_runs() ? 8 : l.words_per_key;
    const int64_t masks = l.batch * l.heads;
    std::vector<std::pair<int64_t, int64_t>> parts{{l.row_live, masks * l.row_granules * of_row * 8},
                                                   {l.row_full, masks * l.row_granules * of_row * 8},
                                                   {l.key_live, masks * l.key_blocks * of_key * 8},
                                                   {l.key_full, masks * l.key_blocks * of_key * 8},
                                                   {l.row_counts, masks * l.row_granules * 4},
                                                   {l.key_counts, masks * l.key_blocks * 4},
                                                   {l.key_order, masks * l.key_blocks * 4},
                                                   {l.row_tile_counts_128, masks * l.row_tiles_128 * 4},
                                                   {l.row_tile_order_128, masks * l.row_tiles_128 * 4},
                                                   {l.row_tile_counts_192, masks * l.row_tiles_192 * 4},
                                                   {l.row_tile_order_192, masks * l.row_tiles_192 * 4},
                                                   {l.scratch, masks * l.key_blocks * 8},
                                                   {l.most_runs, l.in_runs() ? 4 : 0},
                                                   {l.extents(), l.batch * 8}};
    if (l.has_bits()) {
      parts.insert(parts.end(), {{l.ascending_lists, masks * l.key_blocks * 16},
                                 {l.tiles_before, (masks * l.row_granules * l.words_per_row * 2 + 1) * 4},
                                 {l.tile_bits, l.bit_tiles * 1024}});
    }
    int64_t end = 48;  // the header
    for (const auto& [begin, bytes] : parts) {
      ASSERT_EQ(begin % 8, 0);
      ASSERT_GE(begin, end);
      end = begin + bytes;
    }
    ASSERT_LE(end, l.bytes);
  }
}

TEST(Size, PlanInRunsIsLinear) {
  const auto bytes = [](int64_t length) { return PlanLayout(length, length, 1, 1, kNoBits, PlanForm::kRuns).bytes; };
  EXPECT_LE(bytes(kMillion), 4 << 20);
  for (const int64_t length : {64 * kThousand, kMillion, 16 * kMillion})
    EXPECT_LE(bytes(2 * length), 2 * bytes(length));
}

TEST(Size, LongPlansOfFewRunsAreInRuns) {
  const Device cpu{};
  for (const char* family : {"full", "causal", "causal_document", "sliding_window", "shared_question"}) {
    const bool is_long = std::string_view(family) == "causal_document";
    const Mask mask = make_family(family, is_long ? kMillion : 300 * kThousand, {}, 1);
    std::vector<uint64_t> scratch(static_cast<std::size_t>(count_plan_scratch(mask.view(), cpu) / 8));
    EXPECT_TRUE(count_plan_layout(mask.view(), std::as_writable_bytes(std::span(scratch)), cpu).in_runs()) << family;
    const Plan plan(mask);
    EXPECT_TRUE(plan.view().layout().in_runs()) << family;
    EXPECT_LE(plan.buffer().size(), std::size_t{4} << 20) << family;
  }
}

TEST(Size, OtherPlansAreInBits) {
  const Device cpu{};
  const Mask short_mask = make_family("causal_document", 128 * kThousand, {}, 1);
  EXPECT_EQ(count_plan_scratch(short_mask.view(), cpu), 0);
  EXPECT_FALSE(count_plan_layout(short_mask.view(), {}, cpu).in_runs()) << "its bits are few";
  EXPECT_FALSE(Plan(short_mask).view().layout().in_runs());
  // Every other block.
  constexpr int64_t kBlocks = 2100;
  MaskParts parts{.seqlen_q = kBlocks * 128, .seqlen_k = kBlocks * 128};
  for (int64_t n = 0; n < kBlocks * kBlocks; ++n) parts.block_mask.push_back((n / kBlocks + n) % 2 == 0 ? 1 : 0);
  const Mask striped(parts);
  const int64_t bytes = count_plan_scratch(striped.view(), cpu);
  EXPECT_EQ(bytes, PlanLayout(kBlocks * 128, kBlocks * 128, 1, 1, kNoBits, PlanForm::kRuns).bytes);
  std::vector<uint64_t> scratch(static_cast<std::size_t>(bytes / 8));
  const auto memory = std::as_writable_bytes(std::span(scratch));
  EXPECT_FALSE(count_plan_layout(striped.view(), memory, cpu).in_runs());
  expect_invalid({"scratch has 8 bytes", "needs " + std::to_string(bytes)},
                 [&] { count_plan_layout(striped.view(), memory.first(8), cpu); });
  EXPECT_FALSE(Plan(striped).view().layout().in_runs());
  expect_invalid({"8 runs", "its mask has lines of more"}, [&] { build_plan(striped.view(), memory, cpu); });
  // A mask with positions, whatever they are.
  parts = {.seqlen_q = 300 * kThousand, .seqlen_k = 300 * kThousand, .band = Band::causal()};
  parts.q_pos.resize(static_cast<std::size_t>(parts.seqlen_q)), parts.k_pos.resize(parts.q_pos.size());
  EXPECT_EQ(count_plan_scratch(Mask(parts).view(), cpu), 0);
}

TEST(Size, BuffersWithRoomForRunsAloneHoldThem) {
  constexpr int64_t kLength = 300 * kThousand;
  const Mask mask = make_family("causal_document", kLength, {}, 1);
  const PlanLayout runs(kLength, kLength, 1, 1, kNoBits, PlanForm::kRuns), bits(kLength, kLength, 1, 1);
  std::vector<uint64_t> words(static_cast<std::size_t>(bits.bytes / 8));
  const auto buffer = std::as_writable_bytes(std::span(words));
  build_plan(mask.view(), buffer.first(static_cast<std::size_t>(runs.bytes)), Device{});
  EXPECT_EQ(PlanView(buffer).layout(), runs);
  build_plan(mask.view(), buffer, Device{});
  EXPECT_EQ(PlanView(buffer).layout(), bits);
}

TEST(Size, BitTilesAreLimited) {
  EXPECT_EQ(PlanLayout(1, 1, 1, 1, 1000).bytes - PlanLayout(1, 1, 1, 1, 0).bytes, 1000 * 1024);
  expect_invalid({"seqlen_q 1048576", "has more than 1099511627776 bytes", "at most 1099511627776 (1 TiB)"},
                 [] { PlanLayout(kMillion, kMillion, 1, 1, (int64_t{1} << 30) + 1); });
  expect_invalid({"at most 1099511627776 (1 TiB)"}, [] { PlanLayout(kMillion, kMillion, 1, 1, int64_t{1} << 30); });
}

TEST(Size, MaskHoldsAtMost64BytesForAKeyBesideItsLists) {
  const int64_t length = 128 * kThousand;
  for (const Family& family : families()) {
    const Mask mask = make_family(family.name, length, {}, 1);
    const auto of_lists = static_cast<int64_t>(sizeof(int32_t)) * std::ssize(mask.intervals());
    EXPECT_LE(mask.memory_bytes(), 64 * length * mask.batch() * mask.heads() + of_lists) << family.name;
  }
  // All four vectors of two heads and a block mask, counted on the heap and not by the mask itself.
  MaskParts parts{.seqlen_q = length, .seqlen_k = length, .heads = 2};
  parts.lts = parts.lte = parts.uts = parts.ute = std::vector<int32_t>(static_cast<std::size_t>(2 * length), 5);
  parts.block_mask.assign(1024 * 1024, 1);
  const int64_t before = heap_bytes();
  const Mask mask(parts);
  const int64_t held = heap_bytes() - before;
  EXPECT_EQ(mask.memory_bytes(), 2 * 16 * length + 1024 * 1024);
  EXPECT_LE(mask.memory_bytes(), 64 * 2 * length);
  if (!kSanitized) {
    EXPECT_LE(held, 64 * 2 * length);
    EXPECT_GE(held, mask.memory_bytes()) << "memory_bytes() counts what is there";
  }
  const Mask copy = mask;
  EXPECT_LE(heap_bytes() - before, held + 64) << "copies share the data";
}

TEST(Size, PlanHoldsItsBufferAlone) {
  if (kSanitized) GTEST_SKIP() << "the sanitizer's heap tells nothing";
  const Mask mask = make_family("causal_document", 128 * kThousand, {}, 1);
  const int64_t before = heap_bytes();
  const Plan plan(mask);
  EXPECT_LE(heap_bytes() - before, static_cast<int64_t>(plan.buffer().size()) + 4096);
}

/// Lengths of documents from 1 to 8192 tokens that add up to `total`.
std::vector<int64_t> document_lengths(int64_t total) {
  Random random(3);
  std::vector<int64_t> lengths;
  for (int64_t left = total; left > 0; left -= lengths.back())
    lengths.push_back(std::min<int64_t>(left, random.integer(1, 8192)));
  return lengths;
}

TEST(Size, AMillionTokensInHalfASecond) {
  const std::vector<int64_t> lengths = document_lengths(kMillion);
  const Mask mask = masks::causal_document(Documents::from_lengths(lengths));
  double best = 1e9;
  for (int n = 0; n < 3; ++n) {
    const double start = cpu_seconds();
    const Plan plan(mask);
    best = std::min(best, cpu_seconds() - start);
  }
  std::cout << "plan of 1,048,576 tokens, one head, causal document: " << best << " s\n";
  RecordProperty("seconds", std::to_string(best));
  if (kMeasured) {
    EXPECT_LT(best, 0.5);
  }

  // Rows picked at random, and every row around the first document boundaries, against the documents' own rule:
  // granule (r, c) holds the pairs of rows [64 r, 64 r + 64) and keys [128 c, 128 c + 128).
  const Plan plan(mask);
  std::vector<int64_t> begin_of;  // first token of each token's document
  for (const int64_t length : lengths) {
    const auto begin = static_cast<int64_t>(begin_of.size());
    begin_of.insert(begin_of.end(), static_cast<std::size_t>(length), begin);
  }
  const auto expected = [&](int64_t r, int64_t c) {
    // Row i sees keys [begin_of[i], i]; a granule is empty if that misses its keys in all rows, full if it holds
    // all of them in all rows.
    bool any = false, all = true;
    const int64_t key_begin = c * 128, key_end = key_begin + 128;
    for (int64_t i = r * 64; i < r * 64 + 64; ++i) {
      const int64_t from = std::max(begin_of[static_cast<std::size_t>(i)], key_begin), to = std::min(i + 1, key_end);
      any |= from < to;
      all &= to - from == 128;
    }
    return all ? TileClass::kFull : any ? TileClass::kPartial : TileClass::kEmpty;
  };
  Random random(4);
  std::vector<int64_t> rows{0, 1, 2, plan.view().layout().row_granules - 1};
  for (int n = 0; n < 60; ++n) rows.push_back(random.integer(0, plan.view().layout().row_granules - 1));
  for (const int64_t r : rows) {
    int32_t live = 0;
    for (int64_t c = 0; c < plan.view().layout().key_blocks; ++c) {
      const TileClass granule = expected(r, c);
      live += granule != TileClass::kEmpty;
      ASSERT_EQ(plan.view().granule(0, r, c), granule) << r << " " << c;
      ASSERT_EQ((plan.view().key_live(0, c)[static_cast<std::size_t>(r / 64)] >> (r % 64) & 1) != 0,
                granule != TileClass::kEmpty);
      ASSERT_EQ((plan.view().key_full(0, c)[static_cast<std::size_t>(r / 64)] >> (r % 64) & 1) != 0,
                granule == TileClass::kFull);
    }
    ASSERT_EQ(plan.view().row_counts(0)[static_cast<std::size_t>(r)], live);
  }
  // The counts in both directions agree over the whole plan.
  int64_t by_rows = 0, by_keys = 0;
  for (const int32_t count : plan.view().row_counts(0)) by_rows += count;
  for (const int32_t count : plan.view().key_counts(0)) by_keys += count;
  EXPECT_EQ(by_rows, by_keys);
  EXPECT_EQ(by_rows, plan.view().live_granules());
}

}  // namespace
}  // namespace flashmask::test
