// SPDX-License-Identifier: Apache-2.0
// Report of `flashmask verify` on its cases, including cases that a backend does not take.
#include "verify/tally.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "flashmask/attention.h"
#include "flashmask/status.h"
#include "verify/covering_cases.h"

namespace flashmask::verify {
namespace {

Verdict passed(double error) {
  return {.failures = {}, .figures = {{"out", error}}, .skipped = {}, .forward_only = false};
}
Verdict failed(const char* failure) {
  return {.failures = {failure}, .figures = {{"out", 7}}, .skipped = {}, .forward_only = false};
}
Verdict skipped(const char* reason) {
  return {.failures = {}, .figures = {}, .skipped = reason, .forward_only = false};
}
Verdict forward_only() { return {.failures = {}, .figures = {{"out", 0.1}}, .skipped = {}, .forward_only = true}; }

TEST(Tally, CountsWhatPassedAndFailed) {
  Tally tally;
  tally.add(0, Case{}, passed(0.25));
  tally.add(1, Case{}, passed(0.5));
  EXPECT_TRUE(tally.succeeded());
  EXPECT_EQ(summary(tally), "largest errors, in units of what is allowed:  out 0.5\n2 passed, 0 failed\n");
  tally.add(2, Case{.family = "causal"}, failed("out: too far"));
  EXPECT_FALSE(tally.succeeded());
  EXPECT_EQ(summary(tally), "largest errors, in units of what is allowed:  out 7\n2 passed, 1 failed\n");
  ASSERT_EQ(tally.failures.size(), 1u);
  EXPECT_EQ(tally.failures[0].index, 2u);
  EXPECT_EQ(tally.failures[0].line, describe(Case{.family = "causal"}));
  EXPECT_EQ(tally.failures[0].failures, std::vector<std::string>{"out: too far"});
}

TEST(Tally, NamesEachReasonToSkipWithItsCases) {
  Tally tally;
  for (std::size_t n = 0; n < 3; ++n) tally.add(n, Case{}, skipped("cuda: head_dim 8 is not taken"));
  tally.add(3, Case{}, skipped("cuda: float32 tensors are not taken"));
  tally.add(4, Case{}, passed(0.5));
  EXPECT_TRUE(tally.succeeded());
  EXPECT_EQ(tally.skipped_cases(), 4);
  EXPECT_EQ(summary(tally),
            "largest errors, in units of what is allowed:  out 0.5\n"
            "skipped 1: cuda: float32 tensors are not taken\n"
            "skipped 3: cuda: head_dim 8 is not taken\n"
            "1 passed, 0 failed, 4 skipped\n");
}

TEST(Tally, TakesReasonsTogetherThatDifferInNumbers) {
  Tally tally;
  tally.add(0, Case{}, passed(0.5));
  for (const char* stride : {"17", "8", "170"}) {
    const std::string reason = std::string("cuda: q has stride ") + stride + " in dimension 0";
    tally.add(1, Case{}, skipped(reason.c_str()));
  }
  tally.add(4, Case{}, skipped("cuda: k has stride 17 in dimension 0"));
  EXPECT_EQ(tally.skipped.size(), 4u);
  EXPECT_EQ(summary(tally),
            "largest errors, in units of what is allowed:  out 0.5\n"
            "skipped 1: cuda: k has stride 17 in dimension 0\n"
            "skipped 3: cuda: q has stride 17 in dimension 0, or with other numbers\n"
            "1 passed, 0 failed, 4 skipped\n");
}

TEST(Tally, SkippingEverythingIsNoSuccess) {
  Tally tally;
  tally.add(0, Case{}, skipped("cuda: no"));
  EXPECT_FALSE(tally.succeeded());
  EXPECT_EQ(summary(tally), "skipped 1: cuda: no\n0 passed, 0 failed, 1 skipped\n");
}

TEST(Tally, AFailureIsNeverASkippedCase) {
  Tally tally;
  Verdict both = failed("threw: no such luck");
  both.skipped = "cuda: no";
  tally.add(0, Case{}, both);
  EXPECT_EQ(tally.failed, 1);
  EXPECT_EQ(tally.skipped_cases(), 0);
  EXPECT_FALSE(tally.succeeded());
}

TEST(Tally, SaysThatABackwardWasNotTaken) {
  Tally tally;
  tally.add(0, Case{}, forward_only());
  tally.add(1, Case{}, passed(0.1));
  EXPECT_EQ(summary(tally),
            "largest errors, in units of what is allowed:  out 0.1\n"
            "forward only: the backend took no backward of 1 cases\n"
            "2 passed, 0 failed\n");
}

TEST(CoveringCases, KeepToTheValuesAskedFor) {
  const std::vector<Case> cases = covering_cases({{DataType::kBFloat16}, {64, 128}, {Layout::kBshd}});
  EXPECT_GE(cases.size(), 1500u);
  for (const Case& c : cases) {
    EXPECT_EQ(c.dtype, DataType::kBFloat16);
    EXPECT_TRUE(c.head_dim == 64 || c.head_dim == 128);
    EXPECT_TRUE(c.head_dim_v == 64 || c.head_dim_v == 128);
    EXPECT_EQ(c.layout, Layout::kBshd);
  }
  EXPECT_THROW(covering_cases({.head_dims = {64, 65}}), Error)
      << "one that is not there is not left out without a word";
}

TEST(CoveringCases, OfTheGpuAreWhatThereAreKernelsOf) {
  const CoveringValues values = cuda_values();
  const auto has = [](const auto& list, auto value) {
    return std::find(list.begin(), list.end(), value) != list.end();
  };
  for (const KernelInfo& kernel : kernels()) {
    if (kernel.head_dim == 0) continue;  // plans, and what every head dim shares
    EXPECT_TRUE(has(values.dtypes, kernel.dtype) && has(values.head_dims, int64_t{kernel.head_dim})) << kernel.id;
  }
  EXPECT_FALSE(has(values.dtypes, DataType::kFloat32));
  EXPECT_FALSE(has(values.layouts, Layout::kPadded)) << "rows off 16 bytes";
}

}  // namespace
}  // namespace flashmask::verify
