// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "common/random.h"
#include "flashmask/mask.h"
#include "support/brute_force.h"
#include "support/drawn_mask.h"

/// Shared by the tests of the builders: comparing a mask with a predicate, and random lengths.
namespace flashmask::test {

using Numbers = std::vector<int64_t>;
inline constexpr int64_t kSizes[] = {0, 1, 2, 3, 7, 13, 32, 65, 129};

/// Compares every element with `sees(i, j)`; the mask must stay within bounds.
template <typename Predicate>
void expect_predicate(const Mask& mask, int64_t seqlen_q, int64_t seqlen_k, const std::string& what, Predicate&& sees) {
  ASSERT_EQ(mask.seqlen_q(), seqlen_q) << what;
  ASSERT_EQ(mask.seqlen_k(), seqlen_k) << what;
  ASSERT_EQ(mask.batch(), 1) << what;
  ASSERT_EQ(mask.heads(), 1) << what;
  EXPECT_TRUE(mask.validate().empty()) << what << ": " << mask.validate()[0].what;
  std::vector<uint8_t> expected;
  for (int64_t i = 0; i < seqlen_q; ++i) {
    for (int64_t j = 0; j < seqlen_k; ++j) expected.push_back(sees(i, j));
  }
  const std::vector<uint8_t> got = to_dense(mask);
  if (seqlen_q <= 32 && seqlen_k <= 32) {
    EXPECT_EQ(draw(got, seqlen_q, seqlen_k), draw(expected, seqlen_q, seqlen_k)) << what;
  } else {
    EXPECT_TRUE(got == expected) << what << " at " << seqlen_q << "x" << seqlen_k;
  }
}

/// Random lengths, zeros among them, that add up to `total`.
inline Numbers random_lengths(Random& random, int64_t total) {
  Numbers lengths;
  for (int64_t left = total; left > 0;) {
    lengths.push_back(random.integer(0, 3) == 0 ? random.integer(0, 1) : random.integer(0, left));
    left -= lengths.back();
  }
  if (random.integer(0, 4) == 0) lengths.push_back(0);
  return lengths;
}

/// The document (block, group, ...) that each token belongs to: a table, so that the predicates below need no
/// boundaries.
inline Numbers owners(const Numbers& lengths) {
  Numbers owner;
  for (std::size_t n = 0; n < lengths.size(); ++n)
    owner.insert(owner.end(), static_cast<std::size_t>(lengths[n]), static_cast<int64_t>(n));
  return owner;
}

/// Runs `f(random, size)` at every size with several seeds.
template <typename F>
void at_all_sizes(F&& f) {
  for (const int64_t size : kSizes) {
    for (uint64_t seed = 0; seed < 12; ++seed) {
      Random random(seed * 1000 + static_cast<uint64_t>(size));
      f(random, size);
      if (testing::Test::HasFailure()) FAIL() << "at size " << size << ", seed " << seed;
    }
  }
}

}  // namespace flashmask::test
