// SPDX-License-Identifier: Apache-2.0

// Calls over a cache against sums in float64, on both backends.

#include <gtest/gtest.h>

#include "cache/cached_call.h"
#include "support/extent.h"

namespace flashmask::test {
namespace {

void expect_right(const CachedShape& shape, const CachedPlacement& placement, uint32_t seed) {
  const CachedCase c(shape, seed);
  LaidOutCall call(c, placement);
  const bool halves = shape.dtype == DataType::kBFloat16 || shape.dtype == DataType::kFloat16;
  for (const char* backend : {"reference", "cpu"}) {
    if (shape.dtype == DataType::kFloat64 && backend[0] == 'c') continue;
    call.options.backend = backend;
    SCOPED_TRACE(testing::Message() << backend << " seed " << seed);
    call.run().expect_right(halves ? 2e-2 : 2e-5);
    if (testing::Test::HasFatalFailure()) return;
  }
}

CachedShape random_shape(std::mt19937& random) {
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint32_t>(n)); };
  CachedShape s;
  s.packed = below(2) == 0;
  const int64_t batch = 1 + below(4), m = 1 + below(9);
  s.keys.clear();
  s.rows.clear();
  for (int64_t b = 0; b < batch; ++b) {
    s.keys.push_back(below(6) == 0 ? 0 : below(300));
    s.rows.push_back(s.packed ? below(12) : m);
  }
  s.heads_kv = 1 + below(3);
  s.heads_q = s.heads_kv * (1 + below(6));
  s.head_dim = 1 + below(70);
  s.head_dim_v = below(2) == 0 ? s.head_dim : 1 + below(70);
  s.causal = below(3) != 0;
  if (below(3) == 0) s.window_left = below(40);
  if (below(4) == 0) s.window_right = below(20);
  s.vectors = static_cast<int>(below(3)) * (s.causal ? 1 : 2);
  s.vectors_by_head = below(2) == 0;
  s.has_positions = below(4) == 0;
  if (below(3) == 0) s.tail = 1 + below(40);
  s.has_tail_lens = s.tail > 0 && below(2) == 0;
  s.has_depth = s.tail > 0 && !s.has_positions && below(2) == 0;
  if (below(4) == 0) {
    s.row_blocks = 1 + below(3);
    s.key_blocks = 1 + below(3);
    s.blocks_by_head = below(2) == 0;
  }
  s.has_sink = below(3) == 0;
  s.has_alibi = below(3) == 0;
  if (below(3) == 0) s.softcap = 3;
  constexpr DataType kTypes[] = {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16, DataType::kFloat64};
  s.dtype = kTypes[below(4)];
  s.cache_dtype = below(4) == 0 ? DataType::kFloat8E4M3 : s.dtype;
  s.has_scales = s.cache_dtype == DataType::kFloat8E4M3 && below(2) == 0;
  return s;
}

TEST(CachedMeaning, RandomCalls) {
  std::mt19937 random(20261128);
  constexpr int64_t kPageSizes[] = {0, 1, 3, 16, 64, 128};
  for (int64_t n = 0; n < scaled(1200); ++n) {
    const CachedShape shape = random_shape(random);
    CachedPlacement placement{.page_size = kPageSizes[random() % 6], .order = static_cast<uint32_t>(random())};
    placement.lists = placement.page_size > 0 && random() % 3 == 0;
    placement.heads_first = random() % 2 == 0;
    placement.in_pages = random() % 2 == 0;
    expect_right(shape, placement, static_cast<uint32_t>(n));
    if (HasFatalFailure()) return;
  }
}

TEST(CachedMeaning, LongSequencesAndManyRows) {
  expect_right({.keys = {3000, 2100}, .rows = {1, 1}, .heads_q = 8, .heads_kv = 2, .head_dim = 64, .head_dim_v = 64},
               {.page_size = 16}, 1);
  expect_right({.keys = {1500},
                .rows = {150},
                .heads_q = 2,
                .heads_kv = 1,
                .head_dim = 16,
                .head_dim_v = 16,
                .window_left = 700},
               {.page_size = 64}, 2);
  expect_right({.keys = {700},
                .rows = {150},
                .heads_q = 4,
                .heads_kv = 2,
                .head_dim = 16,
                .head_dim_v = 16,
                .row_blocks = 6,
                .key_blocks = 5,
                .blocks_by_head = true},
               {.page_size = 64}, 3);
}

TEST(CachedMeaning, HeadDimsOf256AndGroupsOf16) {
  expect_right({.keys = {90}, .rows = {5}, .heads_q = 16, .heads_kv = 1, .head_dim = 256, .head_dim_v = 192},
               {.page_size = 16}, 3);
}

TEST(CachedMeaning, RowsOfNoRequestAreNotWritten) {
  const CachedCase c({}, 4);
  LaidOutCall call(c, {});
  const int64_t end = c.total_rows();
  call.run();
  const auto* out = static_cast<const uint32_t*>(call.args.out.data);
  for (int64_t at = end * call.args.out.stride[0]; at < (end + 2) * call.args.out.stride[0]; ++at)
    ASSERT_EQ(out[at], 0xffffffffu) << at;
}

TEST(CachedMeaning, KeysOfPagesThatAreNotThereAreZeros) {
  CachedShape shape{.keys = {40}, .rows = {2}};
  CachedCase c(shape, 5);
  for (double& x : c.sequences[0].k) x = &x - c.sequences[0].k.data() < 16 * 2 * 24 ? 0.0 : x;
  for (double& x : c.sequences[0].v) x = &x - c.sequences[0].v.data() < 16 * 2 * 24 ? 0.0 : x;
  LaidOutCall call(c, {.page_size = 16});
  for (const int32_t page : {-1, 1 << 30, -(1 << 30)}) {
    static_cast<int32_t*>(call.args.cache.page_table.data)[0] = page;
    for (const char* backend : {"reference", "cpu"}) {
      call.options.backend = backend;
      call.run().expect_right(2e-5);
    }
  }
}

TEST(CachedMeaning, LengthsAreClampedToTheTables) {
  const CachedCase c({.keys = {48}, .rows = {2}}, 6);
  LaidOutCall call(c, {.page_size = 16, .lists = true});
  call.seqlens.set(0, 1e9);
  call.run().expect_right(2e-5);
}

}  // namespace
}  // namespace flashmask::test
