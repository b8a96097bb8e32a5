// SPDX-License-Identifier: Apache-2.0

// Features beyond the softmax of masked scores: the CPU kernels against the oracle, both on rows that see nothing, and
// bits that never change. gradient_test.cpp tests the oracle's gradients.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "attention/compare.h"
#include "common/element.h"
#include "families/families.h"
#include "flashmask/builders.h"
#include "support/expect_error.h"

namespace flashmask::test {
namespace {

constexpr Sizes kSizes{
    .batch = 2, .seqlen_q = 300, .seqlen_k = 333, .heads_q = 4, .heads_kv = 2, .head_dim = 20, .head_dim_v = 12};

/// Rows below 100 see nothing, and so do others.
Mask mask_with_blind_rows() { return crop(make_family("causal_document", 400, {}, 5), 0, 300, 67, 400); }

struct Asked {
  std::string name;
  double softcap = 0;
  bool sink = false;
  double dropout = 0;
  int64_t split_size = 0;
};
const Asked kAsked[] = {{"sink", 0, true},
                        {"softcap 0.5", 0.5},
                        {"softcap 30", 30},
                        {"softcap 256", 256},
                        {"softcap 2, sink", 2, true},
                        {"dropout 0.1", 0, false, 0.1},
                        {"dropout 0.8", 0, false, 0.8},
                        {"all", 5, true, 0.3},
                        {"split_size 128", 0, false, 0, 128},
                        {"split_size 256, softcap 2, sink", 2, true, 0, 256}};
constexpr uint64_t kState[2] = {11, 12};

Call<float> call_with(const Asked& asked, uint64_t seed = 1) {
  Call<float> call(kSizes, seed);
  call.with_dlse = true;
  call.options.features.softcap = asked.softcap;
  call.options.features.dropout = {.p = asked.dropout, .state = kState};
  call.options.features.split_size = asked.split_size;
  if (asked.sink) call.add_sink(seed);
  return call;
}

/// A call whose out or dq has not the dtype that partial_out means is refused, and the dtype of q is no obstacle.
TEST(Features, PartialResultsAreFloat32) {
  const Call<float> call(kSizes);
  std::vector<uint16_t> halves(call.q.size() + call.k.size(), 0x3f80);
  ForwardArgs args = call.forward_args();
  for (TensorView* t : {&args.q, &args.k, &args.v}) t->data = halves.data(), t->dtype = DataType::kBFloat16;
  for (const char* backend : {"cpu", "reference"}) {
    Options options{.features = {.partial_out = true}, .backend = backend};
    std::vector<std::byte> workspace(forward_workspace(args, options));
    forward(args, workspace, options);
    for (const float x : call.out) ASSERT_EQ(x, 1.0f) << "the mean of ones";
    options.features.partial_out = false;
    expect_invalid({"out is float32", "must be bfloat16"}, [&] { forward_workspace(args, options); });
    options.features.partial_out = true;
    ForwardArgs halved = args;
    halved.out.dtype = DataType::kBFloat16;
    expect_invalid({"out is bfloat16", "must be float32"}, [&] { forward_workspace(halved, options); });
  }
}

/// partial_out changes no bit if tensors are float32 (or float64) already.
TEST(Features, PartialResultsOfFloat32AreTheResults) {
  Call<float> plain(kSizes), partial(kSizes);
  partial.options.features.partial_out = true;
  for (Call<float>* call : {&plain, &partial}) call->mask = mask_with_blind_rows(), call->run();
  for (const auto of : {&Call<float>::out, &Call<float>::lse, &Call<float>::dq, &Call<float>::dk, &Call<float>::dv})
    EXPECT_EQ(std::memcmp((plain.*of).data(), (partial.*of).data(), (plain.*of).size() * sizeof(float)), 0);
}

TEST(Features, OfTheCpuMatchTheOracle) {
  for (const Asked& asked : kAsked) {
    SCOPED_TRACE(asked.name);
    for (const Mask& mask : {masks::full(300, 333), mask_with_blind_rows()}) {
      Call<float> call = call_with(asked);
      call.mask = mask;
      call.run();
      expect_matches_oracle(call, dense_of(mask));
    }
  }
}

TEST(Features, SkippingAndThreadsNeverChangeABit) {
  for (const Asked& asked : kAsked) {
    SCOPED_TRACE(asked.name);
    const Mask mask = mask_with_blind_rows();
    Call<float> masked = call_with(asked), dense = masked, alone = masked;
    masked.mask = alone.mask = mask;
    masked.options.threads = 3;
    alone.options.threads = 1;
    dense.dense = dense_of(mask);
    masked.run();
    alone.run();
    dense.run();
    EXPECT_TRUE(same_bits(masked, alone));
    // -0 and 0 are the same here.
    EXPECT_TRUE(masked.out == dense.out && masked.lse == dense.lse && masked.dq == dense.dq && masked.dk == dense.dk &&
                masked.dv == dense.dv && masked.dsink == dense.dsink);
    EXPECT_LT(masked.executed.forward, dense.executed.forward);
  }
}

/// Through tiles that are executed, and where there is none at all.
TEST(Features, RowsThatSeeNothingButTheSinkHaveItForLse) {
  for (const std::string backend : {"cpu", "reference"}) {
    for (const bool empty : {false, true}) {
      Call<float> call = call_with({.name = "", .sink = true});
      call.options.backend = backend;
      call.mask = empty ? masks::sliding_window(300, 333, 0, 0, 1000) : mask_with_blind_rows();
      call.run();
      const std::vector<uint8_t> visible = dense_of(*call.mask);
      int64_t blind = 0;
      std::vector<double> dsink(4);
      for (int64_t n = 0; n < static_cast<int64_t>(call.lse.size()); ++n) {
        const int64_t h = n / 300 % 4, i = n % 300, b = n / 1200;
        if (std::any_of(&visible[i * 333], &visible[i * 333] + 333, [](uint8_t v) { return v != 0; })) continue;
        ++blind;
        EXPECT_EQ(call.lse[n], call.sink[h]);
        for (int64_t c = 0; c < 12; ++c) EXPECT_EQ(call.out[((b * 300 + i) * 4 + h) * 12 + c], 0);
        for (int64_t c = 0; c < 20; ++c) EXPECT_EQ(call.dq[((b * 300 + i) * 4 + h) * 20 + c], 0);
        dsink[h] += call.dlse[n];
      }
      EXPECT_GT(blind, 0);
      if (!empty) continue;
      EXPECT_EQ(blind, 2 * 4 * 300);
      EXPECT_EQ(call.executed.forward, 0);
      EXPECT_LE(max_error(call.dsink, dsink), 1e-5);  // lse is the sink
    }
  }
}

/// Far above all scores, far below, and nothing.
TEST(Features, ExtremeSinks) {
  for (const std::string backend : {"cpu", "reference"}) {
    Call<float> call = call_with({.name = "", .sink = true}), without = call_with({});
    call.options.backend = without.options.backend = backend;
    call.sink = {90, -200, -std::numeric_limits<float>::infinity(), 1e30f};
    call.mask = without.mask = mask_with_blind_rows();
    call.run();
    without.run();
    for (int64_t n = 0; n < static_cast<int64_t>(call.lse.size()); ++n) {
      const int64_t h = n / 300 % 4;
      const float keys = without.lse[n], want = h == 2 ? keys : std::max(keys, call.sink[h]);
      EXPECT_EQ(call.lse[n], want) << h;
    }
    for (int64_t n = 0; n < static_cast<int64_t>(call.out.size()); ++n) {
      const int64_t h = n / 12 % 4;
      const bool unchanged = h == 1 || h == 2;
      EXPECT_NEAR(call.out[n], unchanged ? without.out[n] : 0.0f, unchanged ? 0 : 1e-30) << h;
    }
    for (const float x : call.dsink) EXPECT_TRUE(std::isfinite(x));
    EXPECT_EQ(call.dsink[2], 0);
  }
}

TEST(Features, SinksOfTheTensorsOwnTypeAndOfAnyStride) {
  for (const DataType dtype : {DataType::kBFloat16, DataType::kFloat16}) {
    Call<float> exact({.seqlen_q = 70, .seqlen_k = 90, .heads_q = 4, .heads_kv = 2});
    std::vector<uint16_t> q(exact.q.size()), k(exact.k.size()), v(exact.v.size()), dout(exact.dout.size()),
        out(exact.out.size()), sink(8), dsink(12, 0x7fff);
    exact.sink.resize(4);
    exact.dsink.resize(4);
    const auto round = [&](std::vector<float>& from, std::vector<uint16_t>& to, int64_t step = 1) {
      TensorView view = TensorView::contiguous(to.data(), dtype, {static_cast<int64_t>(to.size())});
      for (std::size_t n = 0; n < from.size(); ++n) {
        store_element(view, static_cast<int64_t>(n) * step, from[n]);
        from[n] = static_cast<float>(load_element(view, static_cast<int64_t>(n) * step));
      }
    };
    for (int64_t h = 0; h < 4; ++h) exact.sink[h] = 0.3f * static_cast<float>(h) - 0.2f;
    round(exact.q, q);
    round(exact.k, k);
    round(exact.v, v);
    round(exact.dout, dout);
    round(exact.sink, sink, 2);
    exact.forward();
    std::vector<float> exact_out = exact.out;
    round(exact.out, out);  // the backward reads the rounded out
    exact.backward();

    BackwardArgs args = exact.backward_args();
    const auto as = [&](const TensorView& like, const std::vector<uint16_t>& data) {
      TensorView view = like;
      view.data = const_cast<uint16_t*>(data.data());
      view.dtype = dtype;
      return view;
    };
    std::vector<uint16_t> dq(q.size()), dk(k.size()), dv(v.size());
    args.q = as(args.q, q), args.k = as(args.k, k), args.v = as(args.v, v), args.dout = as(args.dout, dout);
    args.dq = as(args.dq, dq), args.dk = as(args.dk, dk), args.dv = as(args.dv, dv), args.out = as(args.out, out);
    Options options{.features = {.sink = TensorView::contiguous(sink.data(), dtype, {4})}};
    options.features.sink.stride[0] = 2;
    args.dsink = TensorView::contiguous(dsink.data(), dtype, {4});
    args.dsink.stride[0] = 3;
    std::vector<std::byte> workspace(backward_workspace(args, options));
    backward(args, workspace, options);
    const double unit = dtype == DataType::kBFloat16 ? 0x1p-8 : 0x1p-11;
    for (int64_t h = 0; h < 4; ++h) {
      EXPECT_NEAR(load_element(args.dsink, 3 * h), exact.dsink[h], unit * std::abs(exact.dsink[h]));
      EXPECT_EQ(dsink[3 * h + 1], 0x7fff);
    }
    // A float32 sink is taken beside them, too.
    options.features.sink = Call<float>::view(exact.sink, {4});
    std::vector<float> dsink32(4);
    args.dsink = Call<float>::view(dsink32, {4});
    backward(args, workspace, options);
    EXPECT_LE(max_error(dsink32, exact.dsink), 1e-6 * max_value(exact.dsink));
  }
}

/// Without rows, keys or batch entries the gradient of the sink is there, and 0 but for what reaches lse.
TEST(Features, TheSinksGradientOfEmptyCalls) {
  for (const std::string backend : {"cpu", "reference"}) {
    for (Sizes sizes : {Sizes{.batch = 0, .seqlen_q = 3, .seqlen_k = 3}, Sizes{.seqlen_q = 0, .seqlen_k = 3},
                        Sizes{.seqlen_q = 3, .seqlen_k = 0}, Sizes{.seqlen_q = 0, .seqlen_k = 0}}) {
      sizes.heads_q = 2;
      Call<float> call(sizes);
      call.with_dlse = true;
      call.options.backend = backend;
      call.add_sink();
      call.run();
      for (int64_t h = 0; h < 2; ++h) {
        double want = 0;
        for (int64_t i = 0; i < sizes.batch * sizes.seqlen_q; ++i) want += call.dlse[h * sizes.seqlen_q + i];
        EXPECT_NEAR(call.dsink[h], want, 1e-6) << backend;
        for (int64_t i = 0; i < sizes.batch * sizes.seqlen_q; ++i)
          EXPECT_EQ(call.lse[h * sizes.seqlen_q + i], call.sink[h]);
      }
    }
  }
}

/// Capped scores differ from the exact ones by no more than float32 does, for caps from far below the scores to far
/// above: one row and one key give lse = the score.
TEST(Features, SoftcapIsExactForSmallAndLargeScores) {
  for (const double softcap : {1e-18, 1e-3, 0.7, 30.0, 256.0}) {
    for (const double scale : {1e-6, 0.01, 0.5, 3.0, 40.0, 1e4}) {
      Call<float> call({.seqlen_q = 64, .seqlen_k = 1, .head_dim = 1, .head_dim_v = 1});
      call.options.features.softcap = softcap;
      call.options.softmax_scale = scale;
      call.forward();
      for (int64_t i = 0; i < 64; ++i) {
        const double score = scale * call.q[i] * call.k[0], want = softcap * std::tanh(score / softcap);
        EXPECT_NEAR(call.lse[i], want, 4e-7 * std::abs(want)) << softcap << " " << score;
      }
    }
  }
}

/// A score that is not a number stays one, capped or not.
TEST(Features, NaNIsNotCapped) {
  for (const std::string backend : {"cpu", "reference"}) {
    Call<float> call = call_with({.name = "", .softcap = 30, .sink = true});
    call.options.backend = backend;
    call.q[0] = std::numeric_limits<float>::quiet_NaN();
    call.run();
    EXPECT_TRUE(std::isnan(call.out[0]) && std::isnan(call.lse[0])) << backend;
    EXPECT_TRUE(std::isfinite(call.lse[1])) << backend;
  }
}

}  // namespace
}  // namespace flashmask::test
