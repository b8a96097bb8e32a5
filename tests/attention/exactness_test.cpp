// SPDX-License-Identifier: Apache-2.0

// Choices that never change a bit of the results, tiles that are really skipped, and a call's use of memory.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <thread>

#include "attention/compare.h"
#include "families/families.h"
#include "flashmask/builders.h"
#include "flashmask/float16.h"
#include "flashmask/inspect.h"
#include "support/extent.h"
#include "support/random_masks.h"

namespace flashmask::test {
namespace {

// --- exactness, independence, determinism ----------------------------------------------------------------

TEST(Contract, SkippingNeverChangesABit) {
  for (const Family& family : families()) {
    const Mask mask = crop(make_family(family.name, 400, {}, 5), 100, 400, 0, 333);
    Call<float> masked(
        {.batch = 2, .seqlen_q = 300, .seqlen_k = 333, .heads_q = 2, .heads_kv = 1, .head_dim = 20, .head_dim_v = 12});
    masked.with_dlse = true;
    Call<float> dense = masked;
    masked.mask = mask;
    masked.run();
    dense.dense = dense_of(mask);
    dense.run();
    EXPECT_TRUE(masked.out == dense.out && masked.lse == dense.lse && masked.dq == dense.dq && masked.dk == dense.dk &&
                masked.dv == dense.dv)
        << family.name;
    EXPECT_EQ(dense.executed.forward, 2 * 2 * 5 * 3) << "dense mode executes every tile";
  }
}

TEST(Contract, ADenseMaskMayLieByColumns) {
  constexpr int64_t kRows = 100, kKeys = 133;
  Call<float> by_rows({.seqlen_q = kRows, .seqlen_k = kKeys, .head_dim = 16, .head_dim_v = 16});
  by_rows.dense = dense_of(crop(make_family("causal_document", 200, {}, 5), 80, 180, 20, 153));
  Call<float> by_columns = by_rows;
  by_columns.dense_by_columns = true;
  for (int64_t i = 0; i < kRows; ++i) {
    for (int64_t j = 0; j < kKeys; ++j) by_columns.dense[j * kRows + i] = by_rows.dense[i * kKeys + j];
  }
  by_rows.run();
  by_columns.run();
  EXPECT_TRUE(by_rows.out == by_columns.out && by_rows.dq == by_columns.dq && by_rows.dk == by_columns.dk);
}

TEST(Contract, NeighboursDoNotChangeADocument) {
  const std::vector<int64_t> lengths{50, 37, 90, 60};
  for (const bool causal : {true, false}) {
    Call<float> call({.seqlen_q = 237, .seqlen_k = 237, .heads_q = 2, .heads_kv = 1, .head_dim = 8, .head_dim_v = 8});
    const Documents documents = Documents::from_lengths(lengths);
    call.mask = causal ? masks::causal_document(documents) : masks::document(documents);
    Call<float> other = call;
    call.run();
    // Everything outside of document 1 changes, to values that move every maximum.
    for (auto* tensor : {&other.q, &other.k, &other.v, &other.dout}) {
      const std::size_t row = tensor->size() / 237;
      for (std::size_t n = 0; n < tensor->size(); ++n) {
        if (n / row < 50 || n / row >= 87) (*tensor)[n] = (*tensor)[n] * 30 + 5;
      }
    }
    other.run();
    const auto same = [&](const std::vector<float>& a, const std::vector<float>& b) {
      const std::size_t row = a.size() / 237;
      return std::memcmp(a.data() + 50 * row, b.data() + 50 * row, 37 * row * sizeof(float)) == 0;
    };
    EXPECT_TRUE(same(call.out, other.out));
    EXPECT_TRUE(same(call.dq, other.dq));
    EXPECT_TRUE(same(call.dk, other.dk));
    EXPECT_TRUE(same(call.dv, other.dv));
    EXPECT_FALSE(call.out == other.out);
  }
}

TEST(Contract, TheSameBitsWithAnyNumberOfThreadsAndInEveryRun) {
  const auto run = [](int threads) {
    Call<float> call(
        {.batch = 2, .seqlen_q = 300, .seqlen_k = 420, .heads_q = 4, .heads_kv = 2, .head_dim = 24, .head_dim_v = 16});
    call.mask = crop(make_family("global_sliding_window", 420, {}, 1), 120, 420, 0, 420);
    call.options.threads = threads;
    call.options.deterministic = true;
    call.run();
    return call;
  };
  const Call<float> one = run(1);
  for (const int threads : {1, 2, 7, 0}) {
    for (int repeat = 0; repeat < 3; ++repeat) EXPECT_TRUE(same_bits(one, run(threads))) << threads;
  }
}

TEST(Contract, NoMoreThreadsThanWork) {
  const auto make = [](int threads) {
    Call<float> call({.seqlen_q = 133, .seqlen_k = 300, .heads_q = 2, .heads_kv = 1, .head_dim = 24, .head_dim_v = 16});
    call.mask = make_family("sliding_window", 300, {{"left", "70"}}, 1);
    call.mask = crop(*call.mask, 100, 233, 0, 300);
    call.options.threads = threads;
    call.options.backend = "cpu";
    return call;
  };
  Call<float> one = make(1), six = make(6);  // 3 row tiles of 2 heads
  one.run();
  for (const int threads : {6, 7, 100000, std::numeric_limits<int>::max()}) {
    Call<float> call = make(threads);
    EXPECT_EQ(forward_workspace(call.forward_args(), call.options), forward_workspace(six.forward_args(), six.options));
    EXPECT_EQ(backward_workspace(call.backward_args(), call.options),
              backward_workspace(six.backward_args(), six.options));
    EXPECT_NE(to_string(explain(call.forward_args(), call.options)).find(", 6 threads,"), std::string::npos);
    call.run();
    EXPECT_TRUE(same_bits(one, call)) << threads;
  }
  // Work for any number: no more than a machine can be expected to start.
  const auto many = [](int threads) {
    Call<float> call(
        {.batch = 20, .seqlen_q = 64, .seqlen_k = 1, .heads_q = 100, .heads_kv = 1, .head_dim = 1, .head_dim_v = 1});
    call.options.threads = threads;
    call.options.backend = "cpu";
    return forward_workspace(call.forward_args(), call.options);
  };
  EXPECT_EQ(many(2000), many(std::max<int>(1024, static_cast<int>(std::thread::hardware_concurrency()))));
}

TEST(Contract, ThreadsOfOneHeadTakeTurnsAtDq) {
  // Key tiles of one head add to the same rows of dq, in place (head_dim 64) or beside it (48); of the second size
  // there are fewer row tiles than threads.
  for (const int64_t head_dim : {48, 64}) {
    for (const Sizes& sizes : {Sizes{.seqlen_q = 700, .seqlen_k = 1500, .head_dim = head_dim, .head_dim_v = 32},
                               Sizes{.seqlen_q = 70, .seqlen_k = 2000, .head_dim = head_dim, .head_dim_v = 32}}) {
      const Mask mask = masks::sliding_window(sizes.seqlen_q, sizes.seqlen_k, 400, 300);
      const auto run = [&](int threads, bool dense) {
        Call<float> call(sizes);
        if (dense) {
          call.dense = dense_of(mask);
        } else {
          call.mask = mask;
        }
        call.options.threads = threads;
        call.run();
        return call;
      };
      const Call<float> one = run(1, false);
      expect_matches_oracle(one, dense_of(mask));
      for (int repeat = 0; repeat < 5; ++repeat) EXPECT_TRUE(same_bits(one, run(8, repeat % 2 == 1))) << head_dim;
    }
  }
}

TEST(Contract, APlanMadeInTheCallChangesNothing) {
  Call<float> own({.seqlen_q = 200, .seqlen_k = 200}), given({.seqlen_q = 200, .seqlen_k = 200});
  own.mask = given.mask = make_family("shared_question", 200, {}, 2);
  const Plan plan(*given.mask);
  given.plan = plan.view();
  own.run();
  given.run();
  EXPECT_TRUE(same_bits(own, given));
}

// --- skipping is real ------------------------------------------------------------------------------------

TEST(Contract, ExecutedTilesAreThePlansLiveOnes) {
  for (const Family& family : families()) {
    const Mask mask = make_family(family.name, 700, {}, 9);
    Call<float> call(
        {.batch = 1, .seqlen_q = 700, .seqlen_k = 700, .heads_q = 4, .heads_kv = 2, .head_dim = 2, .head_dim_v = 2});
    call.mask = mask;
    call.run();
    const Plan plan(mask);
    const int64_t live = 4 * plan.view().live_granules();
    EXPECT_EQ(call.executed.forward, live) << family.name;
    EXPECT_EQ(call.executed.backward_rows, live) << family.name;
    EXPECT_EQ(call.executed.backward_keys, live) << family.name;
  }
}

// --- accuracy of the 16-bit types at one glance (the conformance list does the rest) ----------------------

TEST(Contract, SixteenBitInputsAreReadExactly) {
  // Equal values given as bfloat16, float16 and float32 differ in the rounding of the outputs only.
  const Sizes s{.seqlen_q = 90, .seqlen_k = 150, .head_dim = 19, .head_dim_v = 11};
  Call<float> call(s);
  call.mask = masks::causal(90, 150);
  for (auto* tensor : {&call.q, &call.k, &call.v}) {
    for (float& x : *tensor) x = bfloat16_to_float(float_to_bfloat16(std::clamp(x, -4.0f, 4.0f)));
    for (float& x : *tensor) x = float16_to_float(float_to_float16(x));
  }
  call.forward();
  for (const bool bfloat : {true, false}) {
    const auto narrow = [bfloat](const std::vector<float>& from) {
      std::vector<uint16_t> to;
      for (const float x : from) to.push_back(bfloat ? float_to_bfloat16(x) : float_to_float16(x));
      return to;
    };
    const auto q = narrow(call.q), k = narrow(call.k), v = narrow(call.v), want = narrow(call.out);
    std::vector<uint16_t> out(call.out.size());
    std::vector<float> lse(call.lse.size());
    ForwardArgs args = call.forward_args();
    for (auto [view, data] : {std::pair{&args.q, q.data()},
                              {&args.k, k.data()},
                              {&args.v, v.data()},
                              {&args.out, static_cast<const uint16_t*>(out.data())}}) {
      view->data = const_cast<uint16_t*>(data);
      view->dtype = bfloat ? DataType::kBFloat16 : DataType::kFloat16;
    }
    args.lse.data = lse.data();
    std::vector<std::byte> workspace(forward_workspace(args));
    forward(args, workspace);
    EXPECT_EQ(out, want);
    EXPECT_EQ(lse, call.lse);
  }
}

// --- memory ----------------------------------------------------------------------------------------------

TEST(Contract, WorkspaceIsLinearInTheLengths) {
  const auto bytes = [](int64_t seqlen) {
    Call<float> call({.batch = 0,
                      .seqlen_q = seqlen,
                      .seqlen_k = seqlen,
                      .heads_q = 8,
                      .heads_kv = 8,
                      .head_dim = 64,
                      .head_dim_v = 64});
    call.sizes.batch = 1;  // shapes only: the tensors stay empty
    call.plan = {};
    const Mask mask = masks::causal(seqlen, seqlen);
    const Plan plan(mask);
    call.mask = mask;
    call.plan = plan.view();
    call.options.threads = 2;
    return static_cast<double>(backward_workspace(call.backward_args(), call.options));
  };
  EXPECT_LE(bytes(131072), 2.01 * bytes(65536));
  EXPECT_LE(bytes(65536), 8 * 65536 * 4 + 4e6);  // one float a row and head, and two threads' scratch
}

}  // namespace
}  // namespace flashmask::test
