// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "attention/call.h"
#include "flashmask/builders.h"
#include "support/expect_error.h"
#include "support/scoped_variable.h"

namespace flashmask::test {
namespace {

constexpr const char* kVariable = "FLASHMASK_BACKEND";

Call<float> small_call() {
  Call<float> call({.seqlen_q = 130, .seqlen_k = 130, .heads_q = 2});
  call.mask = masks::causal(130, 130);
  return call;
}

TEST(Backends, AreListedAndUsable) {
  const auto list = backends();
  ASSERT_EQ(list.size(), 3u);
  EXPECT_EQ(list[0].name, "cuda");
  EXPECT_EQ(list[1].name, "cpu");
  EXPECT_EQ(list[2].name, "reference");
  for (const BackendInfo& backend : list) {
    EXPECT_TRUE(backend.usable || backend.name == "cuda") << backend.name;
    EXPECT_FALSE(backend.detail.empty());
  }
}

TEST(Backends, AutoTakesCpuAndTheForcedOneRuns) {
  Call<float> call = small_call();
  EXPECT_EQ(explain(call.forward_args(), call.options).backend, "cpu");
  call.forward();
  EXPECT_GT(call.executed.forward, 0);  // only the cpu backend counts tiles

  Call<float> forced = small_call();
  forced.options.backend = "reference";
  EXPECT_EQ(explain(forced.forward_args(), forced.options).backend, "reference");
  forced.forward();
  EXPECT_EQ(forced.executed.forward, 0);
}

TEST(Backends, VariableForcesUnlessTheArgumentDoes) {
  const ScopedVariable variable(kVariable, "reference");
  Call<float> call = small_call();
  EXPECT_EQ(explain(call.forward_args(), call.options).backend, "reference");
  EXPECT_NE(explain(call.forward_args(), call.options).reason.find("FLASHMASK_BACKEND"), std::string::npos);
  call.forward();
  EXPECT_EQ(call.executed.forward, 0);
  call.options.backend = "cpu";
  EXPECT_EQ(explain(call.forward_args(), call.options).backend, "cpu");
  call.forward();
  EXPECT_GT(call.executed.forward, 0);
}

TEST(Backends, UnknownNamesAreErrors) {
  Call<float> call = small_call();
  call.options.backend = "gpu9";
  expect_invalid({"gpu9", "Options::backend", "cpu", "reference"}, [&] { call.forward(); });
  call.options.backend = "auto";
  const ScopedVariable variable(kVariable, "nonsense");
  expect_invalid({"nonsense", "FLASHMASK_BACKEND"}, [&] { call.forward(); });
}

TEST(Backends, Float64IsRefusedNamingWhoTakesIt) {
  Call<double> call({.seqlen_q = 4, .seqlen_k = 4});
  expect_error(ErrorCode::kUnsupported, {"cpu", "float64", "'reference'"}, [&] { call.forward(); });
  const Explanation why = explain(call.forward_args(), call.options);
  EXPECT_TRUE(why.backend.empty());
  EXPECT_EQ(why.rejected.size(), 3u);
  EXPECT_NE(to_string(why).find("no backend takes this call"), std::string::npos);
  call.options.backend = "cpu";
  expect_error(ErrorCode::kUnsupported, {"float64"}, [&] { call.forward(); });
  call.options.backend = "reference";
  EXPECT_NO_THROW(call.run());
}

TEST(Backends, ExplainCountsTheTilesThatAreExecuted) {
  Call<float> call({.batch = 2, .seqlen_q = 300, .seqlen_k = 300, .heads_q = 4, .heads_kv = 2});
  call.mask = masks::causal(300, 300);
  const Explanation why = explain(call.forward_args(), call.options);
  EXPECT_EQ(why.tile, (TileShape{64, 128}));
  EXPECT_EQ(why.tiles, 2 * 4 * 5 * 3);
  EXPECT_EQ(why.workspace_bytes, forward_workspace(call.forward_args(), call.options));
  call.forward();
  EXPECT_EQ(call.executed.forward, why.live_tiles);
  const std::string text = to_string(why);
  for (const char* part : {"backend: cpu", "64x128", "threads", "plan made in the call (", "bytes, in bits)"})
    EXPECT_NE(text.find(part), std::string::npos) << text;
  EXPECT_EQ(explain(call.backward_args(), call.options).live_tiles, why.live_tiles);
}

}  // namespace
}  // namespace flashmask::test
