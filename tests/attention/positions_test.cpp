// SPDX-License-Identifier: Apache-2.0
// Attention under a band over positions, against the oracle and with everything executed.
#include <gtest/gtest.h>

#include "attention/compare.h"
#include "flashmask/plan.h"
#include "support/expect_error.h"
#include "support/extent.h"

namespace flashmask::test {
namespace {

MaskParts random_positioned(Random& random, int64_t batch) {
  MaskParts parts = random_parts(random, random_kind(random), random.integer(1, 300), random.integer(1, 400));
  draw_positions(random, random.flip() ? 1 : batch, parts);
  if (random.integer(0, 3) == 0) draw_block_mask(random, 1, 2, parts);
  return parts;
}

TEST(AttentionByPositions, MatchesTheOracleAndSkippingChangesNoBit) {
  Random random(1);
  for (int64_t n = 0; n < scaled(40); ++n) {
    const MaskParts parts = random_positioned(random, 2);
    Call<float> call({.batch = 2, .seqlen_q = parts.seqlen_q, .seqlen_k = parts.seqlen_k, .heads_q = 4, .heads_kv = 2},
                     static_cast<uint64_t>(n));
    call.with_dlse = true;
    SCOPED_TRACE(n);
    expect_right_with_live_tiles_alone(call, parts);
    if (HasFailure()) return;
  }
}

TEST(AttentionByPositions, TheReferenceReadsThem) {
  Random random(2);
  for (int64_t n = 0; n < scaled(10); ++n) {
    MaskParts parts = random_parts(random, random_kind(random), random.integer(1, 40), random.integer(1, 40));
    draw_positions(random, 2, parts);
    Call<double> call({.batch = 2, .seqlen_q = parts.seqlen_q, .seqlen_k = parts.seqlen_k, .heads_q = 2});
    Call<double> dense = call.oracle(dense_by_rule(parts), 2, 1);
    call.options.backend = "reference";
    call.mask = Mask(parts);
    call.run();
    dense.run();
    EXPECT_TRUE(same_bits(call, dense)) << n;
  }
}

TEST(AttentionByPositions, AnotherPlanOrBatchIsRefused) {
  Call<float> call({.batch = 2, .seqlen_q = 2, .seqlen_k = 2});
  const Mask mask({.seqlen_q = 2, .seqlen_k = 2, .band = Band::causal(), .q_pos = {0, 1}, .k_pos = {0, 1}});
  const Plan plan(mask.with_positions({0, 1}, {1, 0}));
  call.mask = mask;
  call.plan = plan.view();
  expect_invalid({"plan was not made for this mask"}, [&] { call.forward(); });
  call.plan = {};
  call.mask = mask.with_positions({0, 1, 0, 1, 0, 1}, {0, 1, 0, 1, 0, 1}, 3);
  expect_invalid({"mask's q_pos has 3 batch entries", "1 or q's batch, 2"}, [&] { call.forward(); });
}

}  // namespace
}  // namespace flashmask::test
