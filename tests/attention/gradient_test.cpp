// SPDX-License-Identifier: Apache-2.0

// The oracle's gradients against central differences of its forward, in float64.

#include <gtest/gtest.h>

#include "attention/call.h"
#include "families/families.h"
#include "flashmask/builders.h"

namespace flashmask::test {
namespace {

/// The function that is differentiated: sum(out * dout) + sum(lse * dlse) over rows that see something.
double objective(Call<double>& call) {
  call.forward();
  double sum = 0;
  for (std::size_t n = 0; n < call.out.size(); ++n) sum += call.out[n] * call.dout[n];
  for (std::size_t n = 0; n < call.lse.size(); ++n) {
    if (call.with_dlse && std::isfinite(call.lse[n])) sum += call.lse[n] * call.dlse[n];
  }
  return sum;
}

void expect_gradient(Call<double>& call, std::vector<double>& input, const std::vector<double>& gradient,
                     const char* what) {
  constexpr double kStep = 1e-5;
  for (std::size_t n = 0; n < input.size(); n += 3) {
    const double x = input[n];
    input[n] = x + kStep;
    const double above = objective(call);
    input[n] = x - kStep;
    const double below = objective(call);
    input[n] = x;
    ASSERT_NEAR(gradient[n], (above - below) / (2 * kStep), 1e-7) << what << "[" << n << "]";
  }
}

struct Asked {
  double softcap = 0;
  bool sink = false;
  double dropout = 0;
};

void check(const Mask& mask, const Sizes& sizes, bool with_dlse, std::optional<double> scale = std::nullopt,
           const Asked& asked = {}) {
  Call<double> call(sizes, 7);
  call.options.features.softcap = asked.softcap;
  if (asked.sink) call.add_sink();
  constexpr uint64_t kState[2] = {3, 4};
  call.options.features.dropout = {.p = asked.dropout, .state = kState};
  call.mask = mask;
  call.with_dlse = with_dlse;
  call.options.backend = "reference";
  call.options.softmax_scale = scale;
  call.run();
  const auto dq = call.dq, dk = call.dk, dv = call.dv, dsink = call.dsink;
  expect_gradient(call, call.q, dq, "dq");
  expect_gradient(call, call.k, dk, "dk");
  expect_gradient(call, call.v, dv, "dv");
  expect_gradient(call, call.sink, dsink, "dsink");
}

TEST(Gradient, OfEveryFamilyByFiniteDifferences) {
  const Sizes sizes{
      .batch = 1, .seqlen_q = 9, .seqlen_k = 9, .heads_q = 2, .heads_kv = 1, .head_dim = 4, .head_dim_v = 3};
  for (const Family& family : families()) {
    SCOPED_TRACE(family.name);
    check(make_family(family.name, 9, {}, 3), sizes, false);
    check(make_family(family.name, 9, {}, 4), sizes, true);
  }
}

TEST(Gradient, WithRowsThatSeeNothingAndUnequalLengths) {
  const Sizes sizes{
      .batch = 2, .seqlen_q = 8, .seqlen_k = 5, .heads_q = 2, .heads_kv = 2, .head_dim = 3, .head_dim_v = 4};
  check(masks::causal(8, 5), sizes, true);
  check(masks::causal(8, 5, 0), sizes, true, 0.7);
}

TEST(Gradient, WithFeatures) {
  const Sizes sizes{
      .batch = 2, .seqlen_q = 8, .seqlen_k = 7, .heads_q = 4, .heads_kv = 2, .head_dim = 3, .head_dim_v = 4};
  for (const double softcap : {0.0, 0.3, 2.0, 50.0}) {
    for (const bool sink : {false, true}) {
      for (const double dropout : {0.0, 0.4}) {
        SCOPED_TRACE(testing::Message() << "softcap " << softcap << ", sink " << sink << ", dropout " << dropout);
        // Rows that see nothing, and their lse.
        check(masks::causal(8, 7, -2), sizes, true, std::nullopt, {softcap, sink, dropout});
        check(masks::sliding_window(8, 7, 2), sizes, false, 1.7, {softcap, sink, dropout});
      }
    }
  }
}

}  // namespace
}  // namespace flashmask::test
