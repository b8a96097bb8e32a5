// SPDX-License-Identifier: Apache-2.0

// The cpu backend against the oracle on every small mask: each batch of masks is one call, a mask a head.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "attention/call.h"
#include "support/extent.h"
#include "support/small_masks.h"

namespace flashmask::test {
namespace {

/// One head of a tensor [seqlen, heads, dim] by float32's rule. Sums over so few keys can cancel to nearly nothing,
/// far below their terms; the yardstick is therefore the largest value of all heads, drawn from the same tensors.
void expect_head_close(const std::vector<float>& got, const std::vector<double>& want, const char* what, int64_t head,
                       int64_t heads, int64_t rows, int64_t dim, double largest) {
  double error = 0;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t c = 0; c < dim; ++c) {
      const auto at = static_cast<std::size_t>((i * heads + head) * dim + c);
      const double difference = std::abs(static_cast<double>(got[at]) - want[at]);
      error = std::isnan(difference) ? INFINITY : std::max(error, difference);
    }
  }
  ASSERT_LE(error, 1e-5 * largest) << what << " of mask " << head;
}

void expect_lse_close(const std::vector<float>& got, const std::vector<double>& want) {
  for (std::size_t n = 0; n < want.size(); ++n) {
    if (std::isinf(want[n])) {
      ASSERT_EQ(got[n], -INFINITY) << "lse " << n;
    } else {
      ASSERT_LE(std::abs(got[n] - want[n]), 1e-3 * std::max(1.0, std::abs(want[n]))) << "lse " << n;
    }
  }
}

void check(const SmallMasks& masks, uint64_t seed) {
  const int64_t heads = masks.mask.heads(), rows = masks.mask.seqlen_q(), keys = masks.mask.seqlen_k();
  const Sizes sizes{
      .seqlen_q = rows, .seqlen_k = keys, .heads_q = heads, .heads_kv = heads, .head_dim = 3, .head_dim_v = 2};
  Call<float> call(sizes, seed);
  call.mask = masks.mask;
  call.with_dlse = true;
  call.options.backend = "cpu";
  call.run();
  Call<double> oracle = call.oracle(masks.visible, 1, heads);
  oracle.run();
  expect_lse_close(call.lse, oracle.lse);
  const double out = max_value(oracle.out), dq = max_value(oracle.dq), dk = max_value(oracle.dk),
               dv = max_value(oracle.dv);
  for (int64_t h = 0; h < heads && !testing::Test::HasFatalFailure(); ++h) {
    expect_head_close(call.out, oracle.out, "out", h, heads, rows, 2, out);
    expect_head_close(call.dq, oracle.dq, "dq", h, heads, rows, 3, dq);
    expect_head_close(call.dk, oracle.dk, "dk", h, heads, keys, 3, dk);
    expect_head_close(call.dv, oracle.dv, "dv", h, heads, keys, 2, dv);
  }
}

/// Every matrix under some band, and in the long tests under every one.
TEST(ExhaustiveAttention, Every4x4MatrixUnderEveryBand) {
  const int64_t step = test_long() ? stride() : 3 * stride();
  uint64_t seed = 0;
  for (const Band& band : small_bands()) {
    const int64_t first = static_cast<int64_t>(seed) % step;
    check(masks_4x4(band, first, (kMatrices4x4 - first + step - 1) / step, step), seed);
    if (HasFatalFailure()) return;
    ++seed;
  }
}

TEST(ExhaustiveAttention, Every6x3MaskOfTwoIntervals) {
  uint64_t seed = 100;
  for (const Band& band : {Band::none(), Band::causal()})
    check(masks_6x3(band, 0, kMasks6x3 / stride(), stride()), seed++);
}

TEST(ExhaustiveAttention, Seeded6x6) {
  for (int64_t group = 0; group < scaled(kGroups6x6); ++group) {
    check(masks_6x6(group), static_cast<uint64_t>(200 + group));
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace flashmask::test
