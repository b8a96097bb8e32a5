// SPDX-License-Identifier: Apache-2.0
#pragma once

// How calls are compared: with the oracle, and with each other bit for bit.

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <tuple>
#include <vector>

#include "attention/call.h"
#include "flashmask/plan.h"
#include "support/independent_rule.h"
#include "support/random_masks.h"

namespace flashmask::test {

inline std::vector<uint8_t> dense_of(const Mask& mask) { return dense_by_rule(parts_of(mask)); }

/// Everything the call computed, as bits.
template <typename Real>
bool same_bits(const Call<Real>& a, const Call<Real>& b) {
  const auto same = [](const auto& x, const auto& y) {
    return x.size() == y.size() && (x.empty() || std::memcmp(x.data(), y.data(), x.size() * sizeof(x[0])) == 0);
  };
  return same(a.out, b.out) && same(a.lse, b.lse) && same(a.dq, b.dq) && same(a.dk, b.dk) && same(a.dv, b.dv) &&
         same(a.dsink, b.dsink);
}

inline void expect_matches_oracle(const Call<float>& call, const std::vector<uint8_t>& visible, int64_t batch = 1,
                                  int64_t heads = 1) {
  Call<double> oracle = call.oracle(visible, batch, heads);
  oracle.run();
  for (const auto& [name, got, want] : {std::tuple{"out", &call.out, &oracle.out},
                                        {"dq", &call.dq, &oracle.dq},
                                        {"dk", &call.dk, &oracle.dk},
                                        {"dv", &call.dv, &oracle.dv},
                                        {"dsink", &call.dsink, &oracle.dsink}}) {
    EXPECT_LE(max_error(*got, *want), 1e-5 * max_value(*want)) << name;
  }
  EXPECT_LE(max_error(call.lse, oracle.lse), 1e-3);
}

/// Runs a call under a mask, and with all tiles executed under the matrix of the mask's rule: the results are right,
/// and neither skipping changes a bit of them nor does a tile run that is not live.
inline void expect_right_with_live_tiles_alone(Call<float> call, const MaskParts& parts) {
  const Mask mask(parts);
  Call<float> dense = call;
  call.mask = mask;
  call.run();
  dense.dense = dense_by_rule(parts);
  dense.dense_batch = mask.batch();
  dense.dense_heads = mask.heads();
  dense.run();
  expect_matches_oracle(call, dense.dense, mask.batch(), mask.heads());
  EXPECT_TRUE(same_bits(call, dense));
  const Plan plan(mask);
  const int64_t shared = call.sizes.batch / mask.batch() * (call.sizes.heads_q / mask.heads());
  EXPECT_EQ(call.executed.forward, plan.view().live_granules() * shared);
  EXPECT_EQ(call.executed.backward_keys, call.executed.forward);
  EXPECT_EQ(explain(call.forward_args(), call.options).live_tiles, call.executed.forward);
}

}  // namespace flashmask::test
