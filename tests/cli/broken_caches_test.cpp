// SPDX-License-Identifier: Apache-2.0
// A check that cannot fail checks nothing: calls over caches that are wrong in one way each must be found out.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "numerics/number.h"
#include "verify/cached_case.h"
#include "verify/run_case.h"

namespace flashmask::verify {
namespace {

using Change = std::function<void(CachedForwardArgs& args, Options& options)>;
using After = std::function<void(const CachedForwardArgs& args)>;

std::string tested_backend() {
  for (const BackendInfo& backend : backends()) {
    if (backend.name == "cpu" && backend.usable) return "cpu";
  }
  return "reference";
}

/// The library's function with other arguments, and then a change.
RunOptions broken(const Change& before, const After& after = {}) {
  RunOptions options{.backend = tested_backend()};
  options.implementation.cached_forward = [=](CachedForwardArgs args, std::span<std::byte>, Options call) {
    if (before) before(args, call);
    std::vector<std::byte> workspace(cached_forward_workspace(args, call));
    cached_forward(args, workspace, call);
    if (after) after(args);
  };
  return options;
}

/// The case fails, and a failure has this text.
void expect_found(const std::string& line, const RunOptions& options, const std::string& part) {
  const CachedCase c = parse_cached_case(line);
  const Verdict sound = run_case(c, {.backend = tested_backend()});
  EXPECT_TRUE(sound.passed()) << line << "\n" << sound.failures.front();
  std::string all;
  for (const std::string& failure : run_case(c, options).failures) all += failure + "\n";
  EXPECT_NE(all.find(part), std::string::npos) << line << "\nno failure says '" << part << "':\n" << all;
}

const std::string kCase =
    "cache=table seed=6 keys=90,0,33,200 rows=3,2,1,20 heads_q=4 heads_kv=2 head_dim=24 "
    "head_dim_v=17 dtype=bfloat16 ";

TEST(BrokenCaches, OneWrongElement) {
  const auto change = [](const CachedForwardArgs& args) {
    const int64_t at = 4 * args.out.stride[0] + 3 * args.out.stride[1];  // row 4 is request 1's, which sees nothing
    numerics::store(args.out.dtype, args.out.data, at, 1e-3);
  };
  expect_found(kCase, broken({}, change), "out of request 1, head 3");
  const auto of_lse = [](const CachedForwardArgs& args) {
    if (args.lse.defined()) static_cast<float*>(args.lse.data)[args.lse.stride[0] + 2 * args.lse.stride[1]] *= 1.01f;
  };
  expect_found(kCase, broken({}, of_lse), "lse of request 0, head 1, row 2");
}

/// A call that forgets what the mask or the cache has.
TEST(BrokenCaches, ForgottenArguments) {
  const auto forgets = [](auto forget) {
    return broken([forget](CachedForwardArgs& args, Options& options) { forget(args, options); });
  };
  expect_found(kCase + "window=9,-1", forgets([](auto& args, auto&) { args.mask.window_left = -1; }), "out");
  expect_found(kCase + "causal=no", forgets([](auto& args, auto&) { args.mask.causal = true; }), "out");
  expect_found(kCase + "vectors=1", forgets([](auto& args, auto&) { args.mask.bounds = {}; }), "out");
  expect_found(kCase + "vectors=2 beside=sequences", forgets([](auto& args, auto&) { args.mask.bounds = {}; }), "out");
  expect_found(kCase + "tail=20 tail_depth=yes window=30,-1",
               forgets([](auto& args, auto&) { args.mask.tail_depth = {}; }), "out");
  expect_found(kCase + "tail=20 tail_lens=yes", forgets([](auto& args, auto&) { args.mask.tail_lens = {}; }), "out");
  expect_found(kCase + "positions=rows", forgets([](auto& args, auto&) { args.mask.q_pos = {}; }), "out");
  expect_found(kCase + "positions=rows_and_keys", forgets([](auto& args, auto&) { args.mask.k_pos = {}; }), "out");
  expect_found(kCase + "blocks=keys", forgets([](auto& args, auto&) { args.mask.block_mask = {}; }), "out");
  expect_found(kCase + "float8=yes k_scale=token", forgets([](auto& args, auto&) { args.cache.k_scale = {}; }), "lse");
  expect_found(kCase + "float8=yes v_scale=page", forgets([](auto& args, auto&) { args.cache.v_scale = {}; }), "out");
  expect_found(kCase + "sink=yes", forgets([](auto&, Options& options) { options.features.sink = {}; }), "lse");
  expect_found(kCase + "scale=1 softcap=5", forgets([](auto&, Options& options) { options.features.softcap = 0; }),
               "out");
  expect_found(kCase + "alibi=each", forgets([](auto&, Options& options) { options.features.alibi_slopes = {}; }),
               "lse");
}

TEST(BrokenCaches, KeysBeyondTheSequence) {
  const auto longer = [](CachedForwardArgs& args, Options&) {
    if (args.cache.seqlens.defined()) ++static_cast<int32_t*>(args.cache.seqlens.data)[0];
  };
  const auto shorter = [](const CachedForwardArgs& args) {
    if (args.cache.seqlens.defined()) --static_cast<int32_t*>(args.cache.seqlens.data)[0];
  };
  expect_found(kCase + "causal=no", broken(longer, shorter), "out of request 0");
}

TEST(BrokenCaches, RowsOfNoRequest) {
  const auto change = [](const CachedForwardArgs& args) {
    const int64_t row = args.out.shape[0] - 1;
    static_cast<uint16_t*>(args.out.data)[row * args.out.stride[0]] = 0;
  };
  expect_found(kCase, broken({}, change), "wrote outside of its requests' rows");
}

/// Splits at other places give other bits: by the threads, by the batch, with a plan.
TEST(BrokenCaches, BitsThatDependOnOtherThings) {
  const auto splits = [](auto differs) {
    return broken([differs](CachedForwardArgs& args, Options& options) {
      if (differs(args, options)) args.split_size = 128;
    });
  };
  const std::string long_case =
      "cache=table seed=6 keys=900,300 rows=8,8 heads_q=2 heads_kv=1 head_dim=64 head_dim_v=64";
  expect_found(long_case, splits([](const auto&, const Options& options) { return options.threads == 3; }),
               "with 3 threads");
  expect_found(long_case,
               splits([](const CachedForwardArgs& args, const auto&) { return args.cu_seqlens_q.shape[0] == 2; }),
               "without the others");
  expect_found(long_case,
               splits([](const CachedForwardArgs& args, const auto&) { return args.cache.page_indptr.defined(); }),
               "by lists, in pages of 16");
}

TEST(BrokenCaches, BitsThatDependOnTheNumberOfRows) {
  const auto change = [](CachedForwardArgs& args, Options&) {
    if (args.q.shape[0] < 8) args.split_size = 128;
  };
  expect_found("cache=table seed=4 keys=700 rows=8 heads_q=2 heads_kv=1", broken(change), "in a call of the last row");
}

TEST(BrokenCaches, WritesOutsideOfTheWorkspace) {
  RunOptions options{.backend = tested_backend()};
  options.implementation.cached_forward = [](const CachedForwardArgs& args, std::span<std::byte> workspace,
                                             const Options& call) {
    cached_forward(args, workspace, call);
    workspace.data()[workspace.size()] = std::byte{0};
  };
  expect_found(kCase, options, "workspace: the first run wrote outside of it");
}

TEST(BrokenCaches, AnExceptionIsAFailure) {
  RunOptions options{.backend = tested_backend()};
  options.implementation.cached_forward = [](const CachedForwardArgs&, std::span<std::byte>, const Options&) {
    throw std::runtime_error("no such thing");
  };
  expect_found(kCase, options, "threw: no such thing");
}

TEST(CachesOnOtherBackends, AreSkippedByName) {
  const CachedCase c = parse_cached_case(kCase + "float8=yes k_scale=head sink=yes tail=4 alibi=each");
  // Hopper's kernels read no float8, and elsewhere there are none.
  EXPECT_TRUE(run_case(c, {.backend = "cuda"}).skipped.starts_with("cuda: "));
}

}  // namespace
}  // namespace flashmask::verify
