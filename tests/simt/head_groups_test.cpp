// SPDX-License-Identifier: Apache-2.0

// How the heads of a backward are grouped and split, on a GPU of 132 multiprocessors.

#include "backends/cuda/host/head_groups.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>

#include "common/arithmetic.h"

namespace flashmask::cuda {
namespace {

struct Shape {
  int64_t batch, seqlen, heads_q, heads_kv;
};

int64_t head_tiles(const Shape& s) { return ceil_div(s.seqlen, 128); }

Problem problem(const Shape& s) {
  Problem p;
  p.is_backward = true;
  p.batch = s.batch, p.seqlen_q = p.seqlen_k = s.seqlen;
  p.heads_q = s.heads_q, p.heads_kv = s.heads_kv, p.head_dim = p.head_dim_v = 128;
  p.dtype = DataType::kBFloat16;
  p.gpu = GpuModel{.multiprocessors = 132};
  return p;
}

int64_t splits(const Shape& s) { return count_splits(problem(s), s.batch * s.heads_kv * head_tiles(s)); }

int64_t together(const Shape& s) { return head_groups_for_rounds(problem(s), splits(s), head_tiles(s)); }

TEST(HeadGroups, EachMultiprocessorGetsAWorkTile) {
  EXPECT_EQ(splits({1, 8192, 8, 1}), 4) << "of 64 key tiles";
  EXPECT_EQ(splits({1, 2048, 32, 8}), 2) << "of 128 key tiles";
  EXPECT_EQ(splits({1, 2048, 24, 4}), 3) << "of 64 key tiles, which divides 6 query heads";
}

TEST(HeadGroups, FewLongWorkTilesAreSplit) {
  EXPECT_EQ(splits({1, 131072, 8, 1}), 2);
  EXPECT_EQ(splits({2, 32768, 8, 1}), 4);
  EXPECT_EQ(splits({1, 131072, 64, 8}), 1) << "there are many";
  EXPECT_EQ(splits({8, 2048, 32, 8}), 1) << "they are short";
  EXPECT_EQ(splits({1, 131072, 1, 1}), 1) << "there is one query head";
}

TEST(HeadGroups, ShortSequencesShareAnL2Group) {
  EXPECT_EQ(together({1, 4096, 32, 8}), 8);
  EXPECT_EQ(together({1, 8192, 32, 8}), 4);
  EXPECT_EQ(together({1, 8192, 16, 16}), 4) << "of 5 that would do, 16 leave one over";
  EXPECT_EQ(together({1, 131072, 32, 4}), 1) << "one has eight work tiles for each multiprocessor";
  EXPECT_EQ(together({2, 32768, 64, 8}), 1) << "two need 512 MiB";
}

TEST(HeadGroups, AnyShape) {
  std::mt19937 random(0);
  const auto draw = [&](int64_t most) { return 1 + static_cast<int64_t>(random()) % most; };
  for (int n = 0; n < 10000; ++n) {
    const int64_t heads_kv = draw(16);
    const Shape s{draw(8), draw(200000), heads_kv * draw(16), heads_kv};
    const int64_t group = s.heads_q / s.heads_kv, parts = splits(s), all = s.batch * s.heads_kv * parts;
    ASSERT_EQ(group % parts, 0) << s.batch << ' ' << s.seqlen << ' ' << s.heads_q << '/' << s.heads_kv;
    ASSERT_LE(together(s), all);
    ASSERT_GE(together(s), 1);
    if (parts < group) {
      ASSERT_GE(all * head_tiles(s), 132);
    }
  }
}

}  // namespace
}  // namespace flashmask::cuda
