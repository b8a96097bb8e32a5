// SPDX-License-Identifier: Apache-2.0
// Builders of masks of any number of intervals per column, against predicates of single elements.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "flashmask/builders.h"
#include "flashmask/model_masks.h"
#include "mask/builder_checks.h"
#include "support/expect_error.h"

namespace flashmask::test {
namespace {

/// The places that a place of a line sees: the `kernel` of its remainder that are nearest to its own, the ones before
/// it first where two are as near.
std::set<int64_t> nearest(int64_t place, int64_t length, int64_t kernel, int64_t dilation) {
  std::vector<int64_t> places;
  for (int64_t at = place % dilation; at < length; at += dilation) places.push_back(at);
  std::stable_sort(places.begin(), places.end(),
                   [&](int64_t a, int64_t b) { return std::abs(a - place) < std::abs(b - place); });
  return {places.begin(), places.begin() + kernel};
}

TEST(SparseMasks, Neighborhood2d) {
  int64_t lists = 0, vectors = 0;
  for (const auto& [height, width] : {std::pair<int64_t, int64_t>{1, 1}, {1, 9}, {7, 1}, {3, 4}, {6, 5}, {8, 8}}) {
    for (int64_t dilation = 1; dilation <= 3; ++dilation) {
      for (int64_t rows = 1; rows <= height / dilation; ++rows) {
        for (int64_t columns = 1; columns <= width / dilation; ++columns) {
          const Mask mask = masks::neighborhood_2d(height, width, rows, columns, dilation);
          ++(mask.has_interval_lists() ? lists : vectors);
          expect_predicate(mask, height * width, height * width, "neighborhood_2d", [&](int64_t i, int64_t j) {
            return nearest(i / width, height, rows, dilation).contains(j / width) &&
                   nearest(i % width, width, columns, dilation).contains(j % width);
          });
        }
      }
    }
  }
  EXPECT_GT(lists, 50);
  EXPECT_GT(vectors, 20);
}

TEST(SparseMasks, Neighborhood2dAtTheLimits) {
  EXPECT_EQ(masks::neighborhood_2d(0, 5, 1, 1).seqlen_q(), 0);
  EXPECT_EQ(masks::neighborhood_2d(5, 0, 9, 9).seqlen_k(), 0);
  EXPECT_EQ(masks::neighborhood_2d(3, 4, 3, 4).view().content_hash, masks::full(12, 12).view().content_hash);
  // Three of the shifted neighbourhoods reach a key at a border beyond the seven that lie around it.
  EXPECT_EQ(masks::neighborhood_2d(40, 50, 7, 5).num_intervals(), 7 + 3 + 1);
}

TEST(SparseMasks, Neighborhood2dRefuses) {
  expect_invalid({"height is -1", "at least 0"}, [] { masks::neighborhood_2d(-1, 2, 1, 1); });
  expect_invalid({"kernel_height is 0", "at least 1"}, [] { masks::neighborhood_2d(3, 4, 0, 1); });
  expect_invalid({"kernel_height is 4 and dilation 1", "height, 3"}, [] { masks::neighborhood_2d(3, 4, 4, 1); });
  expect_invalid({"kernel_width is 3 and dilation 2", "width, 5"}, [] { masks::neighborhood_2d(6, 5, 1, 3, 2); });
  expect_invalid({"dilation is 0", "at least 1"}, [] { masks::neighborhood_2d(3, 4, 1, 1, 0); });
  expect_invalid({"kernel_height is 1 and dilation 9223372036854775807", "height, 2147483647"},
                 [] { masks::neighborhood_2d(kMaxSeqlen, 1, 1, 1, INT64_MAX); });
  expect_invalid({"height is 65536 and width 32768", "more than 2147483647 tokens"},
                 [] { masks::neighborhood_2d(65536, 32768, 1, 1); });
}

TEST(SparseMasks, Dilated) {
  int64_t lists = 0;
  at_all_sizes([&](Random& random, int64_t size) {
    const int64_t window = random.integer(0, 3) == 0 ? -1 : random.integer(1, size + 2);
    const int64_t dilation = random.integer(1, std::min<int64_t>(size + 1, 9));
    const bool causal = random.flip();
    const Mask mask = masks::dilated(size, window, dilation, causal);
    lists += mask.has_interval_lists();
    expect_predicate(mask, size, size, "dilated", [&](int64_t i, int64_t j) {
      if (causal && j > i) return false;
      for (int64_t n = 0; window == -1 ? n <= size : n < window; ++n) {
        if (j == i - n * dilation || j == i + n * dilation) return true;
      }
      return false;
    });
  });
  EXPECT_GT(lists, 30);
}

TEST(SparseMasks, DilatedByOneIsAWindow) {
  EXPECT_EQ(to_dense(masks::dilated(50, 7, 1, true)), to_dense(masks::sliding_window(50, 50, 6, 0)));
  EXPECT_FALSE(masks::dilated(50, 7, 1).has_interval_lists());
  EXPECT_EQ(masks::dilated(50, -1, 1).view().content_hash, masks::full(50, 50).view().content_hash);
}

TEST(SparseMasks, DilatedAndReorderedIsTheDilatedWindow) {
  const OrderedMask ordered = masks::dilated_window(53, 4, 5);
  const std::vector<uint8_t> visible = to_dense(masks::dilated(53, 4, 5, true)), moved = to_dense(ordered.mask);
  for (std::size_t i = 0; i < 53; ++i) {
    for (std::size_t j = 0; j < 53; ++j) {
      const auto row = static_cast<std::size_t>(ordered.order[i]), key = static_cast<std::size_t>(ordered.order[j]);
      ASSERT_EQ(moved[53 * i + j], visible[53 * row + key]) << i << " " << j;
    }
  }
}

TEST(SparseMasks, DilatedRefuses) {
  expect_invalid({"seqlen is -1", "at least 0"}, [] { masks::dilated(-1, 1, 1); });
  expect_invalid({"window is 0", "at least 1, or -1 for all"}, [] { masks::dilated(9, 0, 1); });
  expect_invalid({"dilation is 0", "at least 1"}, [] { masks::dilated(9, 1, 0); });
  EXPECT_EQ(to_dense(masks::dilated(9, INT64_MAX, INT64_MAX)), to_dense(masks::sliding_window(9, 9, 0, 0)));
}

TEST(SparseMasks, BigBird) {
  int64_t lists = 0;
  at_all_sizes([&](Random& random, int64_t size) {
    const int64_t block = random.integer(1, std::max<int64_t>(size / 6, 1)), blocks = (size + block - 1) / block;
    const int64_t global = random.integer(0, 2), window = random.integer(0, 2), count = random.integer(0, 4);
    const Mask mask = masks::bigbird(size, block, global, window, count, static_cast<uint64_t>(size));
    lists += mask.has_interval_lists();
    const std::vector<uint8_t> visible = to_dense(mask);
    const auto sees = [&](int64_t i, int64_t j) { return visible[static_cast<std::size_t>(i * size + j)] != 0; };
    // Random blocks are known by their number alone.
    for (int64_t b = 0; b < blocks; ++b) {
      int64_t others = 0, drawn = 0;
      for (int64_t c = 0; c < blocks; ++c) {
        const bool seen = sees(b * block, c * block);
        if (b < global || c < global || std::abs(b - c) <= window) {
          ASSERT_TRUE(seen) << b << " " << c;
        } else {
          ++others;
          drawn += seen;
        }
      }
      ASSERT_EQ(drawn, std::min(count, others)) << "block " << b;
    }
    expect_predicate(mask, size, size, "bigbird",
                     [&](int64_t i, int64_t j) { return sees(i / block * block, j / block * block); });
  });
  EXPECT_GT(lists, 30);
}

TEST(SparseMasks, BigBirdDrawsBySeed) {
  const auto hash = [](uint64_t seed) { return masks::bigbird(96, 4, 1, 1, 3, seed).view().content_hash; };
  EXPECT_EQ(hash(7), hash(7));
  EXPECT_NE(hash(7), hash(8));
  std::vector<int64_t> counts(24);  // how often the last block of rows draws each block
  for (uint64_t seed = 0; seed < 400; ++seed) {
    const std::vector<uint8_t> visible = to_dense(masks::bigbird(24, 1, 0, 0, 5, seed));
    for (std::size_t j = 0; j < 24; ++j) counts[j] += visible[23 * 24 + j];
  }
  EXPECT_EQ(counts[23], 400);
  for (std::size_t j = 0; j < 23; ++j) EXPECT_NEAR(static_cast<double>(counts[j]), 400 * 5 / 23., 40) << j;
}

TEST(SparseMasks, BigBirdAtTheLimits) {
  const uint64_t all = masks::full(20, 20).view().content_hash;
  EXPECT_EQ(masks::bigbird(20, 3, INT64_MAX, 0, 0).view().content_hash, all);
  EXPECT_EQ(masks::bigbird(20, 3, 0, INT64_MAX, 0).view().content_hash, all);
  EXPECT_EQ(masks::bigbird(20, 3, 0, 0, INT64_MAX).view().content_hash, all);
  EXPECT_EQ(masks::bigbird(20, INT64_MAX, 0, 0, 0).view().content_hash, all);
  EXPECT_EQ(masks::bigbird(0, 3, 1, 1, 1).seqlen_q(), 0);
  EXPECT_EQ(to_dense(masks::bigbird(90, 1, 3, 5, 0)), to_dense(masks::global_sliding_window(90, 3, 5)));
}

TEST(SparseMasks, BigBirdRefuses) {
  expect_invalid({"block is 0", "at least 1"}, [] { masks::bigbird(9, 0, 1, 1, 1); });
  expect_invalid({"global_blocks is -1", "at least 0"}, [] { masks::bigbird(9, 1, -1, 1, 1); });
  expect_invalid({"window is -1", "at least 0"}, [] { masks::bigbird(9, 1, 1, -1, 1); });
  expect_invalid({"random_blocks is -2", "at least 0"}, [] { masks::bigbird(9, 1, 1, 1, -2); });
}

}  // namespace
}  // namespace flashmask::test
