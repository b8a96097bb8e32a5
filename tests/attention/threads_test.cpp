// SPDX-License-Identifier: Apache-2.0

// The cpu backend's threads. The thread sanitizer watches the same runs: CONTRIBUTING.md, `make test-tsan`.

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "attention/call.h"
#include "families/families.h"

namespace flashmask::test {
namespace {

struct Shape {
  Sizes sizes;
  bool deterministic = false, with_plan = false, with_features = false;
};

Call<float> run(const Shape& shape, const Mask& mask, int threads) {
  Call<float> call(shape.sizes);
  call.mask = mask;
  call.with_dlse = true;
  call.options.backend = "cpu";
  call.options.threads = threads;
  call.options.deterministic = shape.deterministic;
  const Plan plan(mask);
  if (shape.with_plan) call.plan = plan.view();
  if (shape.with_features) {
    static constexpr uint64_t kState[2] = {1, 2};
    call.add_sink();
    call.options.features.softcap = 3;
    call.options.features.dropout = {.p = 0.2, .state = kState};
  }
  call.run();
  call.plan = {};
  return call;
}

void expect_same(const Call<float>& one, const Call<float>& other) {
  for (const auto& [name, a, b] : {std::tuple{"out", &one.out, &other.out},
                                   {"lse", &one.lse, &other.lse},
                                   {"dq", &one.dq, &other.dq},
                                   {"dk", &one.dk, &other.dk},
                                   {"dv", &one.dv, &other.dv},
                                   {"dsink", &one.dsink, &other.dsink}}) {
    if (a->empty()) continue;
    EXPECT_EQ(std::memcmp(a->data(), b->data(), a->size() * sizeof(float)), 0) << name;
  }
  EXPECT_EQ(one.executed.forward, other.executed.forward);
  EXPECT_EQ(one.executed.backward_keys, other.executed.backward_keys);
}

/// Every family with two of the numbers of threads from 2 to 8, so that each number meets several masks.
void expect_same_with_any_threads(const Shape& shape) {
  int n = 0;
  for (const Family& family : families()) {
    const int64_t seqlen_q = shape.sizes.seqlen_q, seqlen_k = shape.sizes.seqlen_k;
    const Mask square = make_family(family.name, seqlen_k, {}, 7);
    const Mask mask = crop(square, seqlen_k - seqlen_q, seqlen_k, 0, seqlen_k);
    const Call<float> one = run(shape, mask, 1);
    for (const int threads : {2 + n % 7, 2 + (n + 3) % 7}) {
      SCOPED_TRACE(std::string(family.name) + ", " + std::to_string(threads) + " threads");
      expect_same(one, run(shape, mask, threads));
    }
    ++n;
  }
}

TEST(Threads, ManySmallHeads) {
  // Less than one tile each: heads follow each other on a thread without pause.
  expect_same_with_any_threads(
      {.sizes = {
           .batch = 2, .seqlen_q = 40, .seqlen_k = 60, .heads_q = 12, .heads_kv = 6, .head_dim = 8, .head_dim_v = 8}});
}

TEST(Threads, TurnsAtDqInPlace) {
  expect_same_with_any_threads(
      {.sizes = {.seqlen_q = 300, .seqlen_k = 900, .heads_q = 2, .heads_kv = 1, .head_dim = 32, .head_dim_v = 8}});
}

TEST(Threads, TurnsAtDqInTheWorkspace) {
  expect_same_with_any_threads(
      {.sizes = {.seqlen_q = 300, .seqlen_k = 900, .heads_q = 1, .heads_kv = 1, .head_dim = 8, .head_dim_v = 16},
       .deterministic = true,
       .with_plan = true});
}

TEST(Threads, WithFeatures) {
  expect_same_with_any_threads(
      {.sizes =
           {.batch = 2, .seqlen_q = 200, .seqlen_k = 300, .heads_q = 4, .heads_kv = 2, .head_dim = 8, .head_dim_v = 16},
       .with_features = true});
}

TEST(Threads, MoreThreadsThanRowTilesWaitForOneTurn) {
  // One row tile, ten key tiles: all threads but one wait at the same word.
  const Mask full = make_family("full", 1280);
  const Shape shape{.sizes = {.seqlen_q = 30, .seqlen_k = 1280, .head_dim = 64, .head_dim_v = 8}};
  const Mask mask = crop(full, 1250, 1280, 0, 1280);
  const Call<float> one = run(shape, mask, 1);
  for (int threads = 2; threads <= 8; ++threads) expect_same(one, run(shape, mask, threads));
}

TEST(Threads, OfTheCallerAtOnceOnOneMaskAndPlan) {
  const Mask mask = make_family("random_eviction", 300);
  const Plan plan(mask);
  const auto run_twice = [&](Call<float>& call) {
    call.mask = mask;
    call.plan = plan.view();
    call.options.backend = "cpu";
    call.options.threads = 2;
    for (int repeat = 0; repeat < 2; ++repeat) call.run();
  };
  const Sizes sizes{.seqlen_q = 300, .seqlen_k = 300, .heads_q = 2, .heads_kv = 2, .head_dim = 32, .head_dim_v = 8};
  std::vector<Call<float>> calls(4, Call<float>(sizes));
  std::vector<std::thread> callers;
  for (Call<float>& call : calls) callers.emplace_back([&] { run_twice(call); });
  for (std::thread& caller : callers) caller.join();
  Call<float> alone(sizes);
  run_twice(alone);
  for (const Call<float>& call : calls) expect_same(alone, call);
}

/// The exit status of `child` in a fork of this process, or that of a shell for the signal that ended it. A fork that
/// hangs is ended after 20 seconds.
int fork_status(const std::function<bool()>& child) {
  const pid_t process = fork();
  if (process == 0) {
    alarm(20);
    _exit(child() ? 0 : 1);
  }
  int status = 0;
  EXPECT_EQ(waitpid(process, &status, 0), process);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

TEST(Threads, AForkOfAProcessThatHadSeveralHasOne) {
  const Shape shape{.sizes = {.seqlen_q = 300, .seqlen_k = 300, .heads_q = 2, .heads_kv = 2, .head_dim = 32}};
  const Mask mask = make_family("random_eviction", 300);
  const Call<float> before = run(shape, mask, 2);
  const auto same_bits = [&](int threads) {
    const Call<float> call = run(shape, mask, threads);
    return call.out == before.out && call.lse == before.lse && call.dq == before.dq && call.dk == before.dk &&
           call.dv == before.dv;
  };
  EXPECT_EQ(fork_status([&] { return same_bits(0) && same_bits(2); }), 0);
  EXPECT_EQ(fork_status([&] { return fork_status([&] { return same_bits(2); }) == 0; }), 0) << "a fork's fork";
  const auto says_one_thread = [] {
    for (const BackendInfo& backend : backends()) {
      if (backend.name == "cpu") return backend.detail.ends_with(", 1 threads");
    }
    return false;
  };
  EXPECT_EQ(fork_status(says_one_thread), 0);
  EXPECT_TRUE(same_bits(2));
}

}  // namespace
}  // namespace flashmask::test
