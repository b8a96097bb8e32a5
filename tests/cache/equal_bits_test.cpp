// SPDX-License-Identifier: Apache-2.0

// Circumstances that change no bit of a result.

#include <gtest/gtest.h>

#include "cache/cached_call.h"

namespace flashmask::test {
namespace {

const CachedShape kShape{.keys = {700, 33, 0, 1300},
                         .rows = {3, 9, 2, 40},
                         .heads_q = 6,
                         .heads_kv = 2,
                         .window_left = 900,
                         .vectors = 2,
                         .vectors_by_head = true,
                         .has_sink = true,
                         .dtype = DataType::kBFloat16,
                         .cache_dtype = DataType::kBFloat16};

TEST(CachedBits, PagesAndLayouts) {
  const CachedCase c(kShape, 1);
  const auto wanted = LaidOutCall(c, {}).run().all_bits();
  for (const CachedPlacement& placement : {CachedPlacement{.page_size = 0, .in_pages = false},
                                           {.page_size = 1},
                                           {.page_size = 3, .lists = true},
                                           {.page_size = 64, .heads_first = true},
                                           {.page_size = 128, .in_pages = false},
                                           {.page_size = 16, .order = 99}}) {
    EXPECT_EQ(LaidOutCall(c, placement).run().all_bits(), wanted) << placement.page_size;
  }
}

TEST(CachedBits, Threads) {
  const CachedCase c(kShape, 2);
  LaidOutCall one(c, {});
  one.options.threads = 1;
  const auto wanted = one.run().all_bits();
  for (const int threads : {2, 3, 8}) {
    LaidOutCall many(c, {});
    many.options.threads = threads;
    EXPECT_EQ(many.run().all_bits(), wanted) << threads;
  }
}

TEST(CachedBits, RestOfTheBatch) {
  const CachedCase c(kShape, 3);
  LaidOutCall all(c, {});
  all.run();
  for (int64_t b = 0; b < c.batch(); ++b) {
    CachedShape alone = kShape;
    alone.keys = {c.keys(b)};
    alone.rows = {c.rows(b)};
    CachedCase one(alone, 0);
    one.sequences = {c.sequences[static_cast<std::size_t>(b)]};
    one.sink = c.sink;
    EXPECT_EQ(LaidOutCall(one, {}).run().all_bits(), all.bits_of(b)) << b;
  }
}

/// Rows in calls of their own have the bits that they have in one call: decoding is prefilling.
TEST(CachedBits, RowsOfACall) {
  const CachedShape shape{.keys = {900}, .rows = {20}, .heads_q = 4, .heads_kv = 2};
  const CachedCase c(shape, 4);
  LaidOutCall all(c, {});
  const auto wanted = all.run().all_bits();
  std::vector<std::byte> rows;
  for (int64_t i = 0; i < 20; ++i) {
    CachedShape one_row = shape;
    one_row.keys = {900 - 20 + 1 + i};
    one_row.rows = {1};
    CachedCase one(one_row, 0);
    const CachedSequence& from = c.sequences[0];
    CachedSequence& to = one.sequences[0];
    const auto first = [](std::size_t n) { return static_cast<std::ptrdiff_t>(n); };
    to.q.assign(from.q.begin() + first(CachedCase::index(i, 4, 0, 24, 0)),
                from.q.begin() + first(CachedCase::index(i + 1, 4, 0, 24, 0)));
    to.k.assign(from.k.begin(), from.k.begin() + first(to.k.size()));
    to.v.assign(from.v.begin(), from.v.begin() + first(to.v.size()));
    const auto bits = LaidOutCall(one, {.page_size = 3}).run().all_bits();
    rows.insert(rows.end(), bits.begin(), bits.end());
  }
  EXPECT_EQ(rows, wanted);
}

TEST(CachedBits, ContentsOfUnusedSlots) {
  const CachedCase c(kShape, 5);
  LaidOutCall call(c, {.page_size = 16});
  const auto wanted = call.run().all_bits();
  auto* k = static_cast<uint16_t*>(call.args.cache.k.data);
  const auto [page, slot] = call.place(1, 32);
  for (int64_t s = slot + 1; s < 16; ++s) k[page * call.args.cache.k.stride[0] + s * call.args.cache.k.stride[1]] = 0;
  EXPECT_EQ(call.run().all_bits(), wanted);
}

}  // namespace
}  // namespace flashmask::test
