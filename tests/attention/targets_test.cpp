// SPDX-License-Identifier: Apache-2.0

// The cpu backend's kernels for every instruction set that this machine has, not only the one it would choose.

#include <gtest/gtest.h>

#include "attention/call.h"
#include "families/families.h"
#include "support/independent_rule.h"
#include "support/instruction_sets.h"

namespace flashmask::test {
namespace {

void check_against_oracle(const Mask& mask, const Sizes& sizes, bool with_features = false) {
  constexpr uint64_t kState[2] = {1, 2};
  Call<float> call(sizes);
  if (with_features) {
    call.add_sink();
    call.options.features.softcap = 3;
    call.options.features.dropout = {.p = 0.2, .state = kState};
  }
  call.mask = mask;
  call.with_dlse = true;
  call.run();
  Call<double> oracle = call.oracle(dense_by_rule(parts_of(mask)));
  oracle.run();
  EXPECT_LE(max_error(call.out, oracle.out), 1e-5 * max_value(oracle.out));
  EXPECT_LE(max_error(call.lse, oracle.lse), 1e-3);
  EXPECT_LE(max_error(call.dq, oracle.dq), 1e-5 * max_value(oracle.dq));
  EXPECT_LE(max_error(call.dk, oracle.dk), 1e-5 * max_value(oracle.dk));
  EXPECT_LE(max_error(call.dv, oracle.dv), 1e-5 * max_value(oracle.dv));
  EXPECT_LE(max_error(call.dsink, oracle.dsink), 1e-5 * max_value(oracle.dsink));
}

TEST(Targets, EveryInstructionSetOfThisMachine) {
  for_every_instruction_set([] {
    for (const char* family : {"full", "causal_document", "global_sliding_window", "random_eviction"}) {
      const Mask mask = crop(make_family(family, 211, {}, 3), 20, 211, 0, 203);
      const Sizes sizes{
          .batch = 1, .seqlen_q = 191, .seqlen_k = 203, .heads_q = 4, .heads_kv = 2, .head_dim = 37, .head_dim_v = 50};
      check_against_oracle(mask, sizes);
      check_against_oracle(mask, sizes, /*with_features=*/true);
    }
  });
}

}  // namespace
}  // namespace flashmask::test
