// SPDX-License-Identifier: Apache-2.0

// Every argument of a call that can be wrong, wrong once: the error names it, what was got and what is accepted.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "attention/call.h"
#include "flashmask/builders.h"
#include "support/expect_error.h"

namespace flashmask::test {
namespace {

class CallErrors : public testing::Test {
 protected:
  CallErrors()
      : call({.batch = 2, .seqlen_q = 6, .seqlen_k = 5, .heads_q = 4, .heads_kv = 2, .head_dim = 8, .head_dim_v = 3}),
        args(call.backward_args()) {}

  /// Changes the arguments, expects the error from running and from asking for the workspace, and changes back.
  template <typename Change>
  void expect_backward(std::initializer_list<std::string> parts, Change change,
                       ErrorCode code = ErrorCode::kInvalidArgument) {
    BackwardArgs wrong = args;
    change(wrong);
    expect_error(code, parts, [&] { backward(wrong, {}, call.options); });
  }

  Call<float> call;
  BackwardArgs args;
};

TEST_F(CallErrors, RankAndShapes) {
  expect_backward({"q", "float32 [2, 6, 4]", "4 dimensions"}, [](auto& a) { a.q.rank = 3; });
  expect_backward({"k", "[2, 5, 2, 9]", "[2, 5, 2, 8]"}, [](auto& a) { a.k.shape[3] = 9; });
  expect_backward({"k", "[3, 5, 2, 8]"}, [](auto& a) { a.k.shape[0] = 3; });
  expect_backward({"v", "[2, 4, 2, 3]", "[2, 5, 2, 3]"}, [](auto& a) { a.v.shape[1] = 4; });
  expect_backward({"v", "heads_kv"}, [](auto& a) { a.v.shape[2] = 4; });
  expect_backward({"out", "[2, 6, 4, 3]"}, [](auto& a) { a.out.shape[3] = 8; });
  expect_backward({"lse", "[2, 4, 6]"}, [](auto& a) { a.lse.shape[1] = 2; });
  expect_backward({"dout"}, [](auto& a) { a.dout.shape[1] = 7; });
  expect_backward({"dlse"}, [&](auto& a) { a.dlse = Call<float>::view(call.dlse, {2, 6, 4}); });
  expect_backward({"dq", "absent"}, [](auto& a) { a.dq = {}; });
  expect_backward({"dk"}, [](auto& a) { a.dk.shape[2] = 4; });
  expect_backward({"dv"}, [](auto& a) { a.dv.shape[3] = 8; });
}

TEST_F(CallErrors, SizesAndHeads) {
  expect_backward({"q has 4 heads and k 3", "multiple"}, [](auto& a) { a.k.shape[2] = a.v.shape[2] = 3; });
  expect_backward({"heads", "at least 1"}, [](auto& a) { a.k.shape[2] = a.v.shape[2] = 0; });
  expect_backward({"q", "-6", "at least 0"}, [](auto& a) { a.q.shape[1] = -6; });
  expect_backward({"q", "2^63"}, [](auto& a) { a.q.shape[0] = a.q.shape[1] = int64_t{1} << 40; });
  expect_backward({"seqlen_k", "2147483648", "2147483647"},
                  [](auto& a) { a.k.shape[1] = a.v.shape[1] = int64_t{1} << 31; });
  expect_backward(
      {"head_dim", "257", "256"}, [](auto& a) { a.q.shape[3] = a.k.shape[3] = 257; }, ErrorCode::kUnsupported);
  expect_backward({"head_dim_v", "0"}, [](auto& a) { a.v.shape[3] = 0; }, ErrorCode::kUnsupported);
}

TEST_F(CallErrors, TypesStridesAndData) {
  expect_backward({"q", "int32", "bfloat16"}, [](auto& a) { a.q.dtype = DataType::kInt32; });
  expect_backward({"k is bfloat16", "it must be float32"}, [](auto& a) { a.k.dtype = DataType::kBFloat16; });
  expect_backward({"lse is float64", "it must be float32"}, [](auto& a) { a.lse.dtype = DataType::kFloat64; });
  expect_backward({"v", "stride 2", "contiguous"}, [](auto& a) { a.v.stride[3] = 2; });
  expect_backward({"q", "stride -32", "at least 0"}, [](auto& a) { a.q.stride[1] = -32; });
  expect_backward({"dk", "output", "stride 0", "overlap"}, [](auto& a) { a.dk.stride[0] = 0; });
  expect_backward({"k has no data"}, [](auto& a) { a.k.data = nullptr; });
  expect_backward({"dv has no data"}, [](auto& a) { a.dv.data = nullptr; });
  expect_backward({"v and q are on different devices"}, [](auto& a) { a.v.device = {Device::Kind::kCuda, 0}; });
}

TEST_F(CallErrors, SizesAndStridesThatOverflow) {
  expect_backward({"q", "strides", "2^63"}, [](auto& a) { a.q.stride[0] = INT64_MAX; });
  expect_backward({"lse", "strides", "2^63"}, [](auto& a) { a.lse.stride[2] = int64_t{1} << 60; });
  expect_backward({"dense_mask", "strides", "2^63"}, [](auto& a) {
    static const std::vector<uint8_t> visible(2 * 6 * 5, 1);
    a.dense_mask = TensorView::contiguous(visible.data(), DataType::kBool, {2, 1, 6, 5});
    a.dense_mask.stride[0] = INT64_MAX;
  });
  // Each of q and v can be counted, but not out, which has the rows of one and the width of the other.
  BackwardArgs wide;
  constexpr int64_t kRows = int64_t{1} << 58;
  wide.q = wide.dq = TensorView::contiguous(nullptr, DataType::kFloat32, {kRows, 1, 1, 1});
  wide.k = wide.dk = TensorView::contiguous(nullptr, DataType::kFloat32, {kRows, 0, 1, 1});
  wide.v = wide.dv = TensorView::contiguous(nullptr, DataType::kFloat32, {kRows, 0, 1, 16});
  wide.out = wide.dout = TensorView::contiguous(nullptr, DataType::kFloat32, {kRows, 1, 1, 16});
  wide.lse = TensorView::contiguous(nullptr, DataType::kFloat32, {kRows, 1, 1});
  expect_invalid({"v", "2^63"}, [&] { backward_workspace(wide, {}); });
  wide.v = wide.dv = TensorView::contiguous(nullptr, DataType::kFloat32, {kRows, 0, 1, 3});
  wide.out = wide.dout = TensorView::contiguous(nullptr, DataType::kFloat32, {kRows, 1, 1, 3});
  expect_invalid({"q", "workspace", "2^63"}, [&] { backward_workspace(wide, {}); });
}

TEST_F(CallErrors, MisalignedData) {
  expect_backward({"the address of k is not a multiple of 4 bytes"},
                  [](auto& a) { a.k.data = static_cast<char*>(a.k.data) + 1; });
  expect_backward({"the address of dq is not a multiple of 4 bytes"},
                  [](auto& a) { a.dq.data = static_cast<char*>(a.dq.data) + 2; });
}

TEST_F(CallErrors, DeviceWithoutABackend) {
  BackwardArgs wrong = args;
  for (TensorView* t :
       {&wrong.q, &wrong.k, &wrong.v, &wrong.out, &wrong.lse, &wrong.dout, &wrong.dq, &wrong.dk, &wrong.dv})
    t->device = {Device::Kind::kCuda, 0};
  const bool usable = backends().front().usable;  // float32 is not taken on CUDA
  expect_error(usable ? ErrorCode::kUnsupported : ErrorCode::kNoDevice, {"cuda: ", "CPU tensors only"},
               [&] { backward(wrong, {}, {}); });
}

TEST_F(CallErrors, Masks) {
  expect_backward({"mask has lengths (6, 6)", "(6, 5)"}, [](auto& a) { a.mask = masks::full(6, 6); });
  const auto stacked = [](int64_t batch, int64_t heads) {
    return Mask({.seqlen_q = 6,
                 .seqlen_k = 5,
                 .batch = batch,
                 .heads = heads,
                 .lts = std::vector<int32_t>(static_cast<std::size_t>(batch * heads * 5), 6)});
  };
  expect_backward({"mask", "3 batch entries", "1 or q's batch, 2"}, [&](auto& a) { a.mask = stacked(3, 1); });
  expect_backward({"mask", "8 heads", "heads_kv (2)", "heads_q (4)"}, [&](auto& a) { a.mask = stacked(1, 8); });
  expect_backward({"block mask", "3 heads"},
                  [&](auto& a) { a.mask = masks::full(6, 5).with_block_mask({1, 1, 1}, 1, 3); });
  EXPECT_NO_THROW((BackwardArgs(args).mask = stacked(2, 4)));
}

TEST_F(CallErrors, DenseMasks) {
  std::vector<uint8_t> visible(3 * 6 * 5, 1);
  const auto dense = [&](std::initializer_list<int64_t> shape) {
    return TensorView::contiguous(visible.data(), DataType::kBool, shape);
  };
  expect_backward({"dense_mask", "[1, 1, 5, 6]"}, [&](auto& a) { a.dense_mask = dense({1, 1, 5, 6}); });
  expect_backward({"dense_mask", "[1, 3, 6, 5]", "1 or 2 or 4"}, [&](auto& a) { a.dense_mask = dense({1, 3, 6, 5}); });
  expect_backward({"dense_mask", "float32"},
                  [&](auto& a) { (a.dense_mask = dense({1, 1, 6, 5})).dtype = DataType::kFloat32; });
  expect_backward({"dense_mask has no data"}, [&](auto& a) { (a.dense_mask = dense({1, 1, 6, 5})).data = nullptr; });
  expect_backward({"mask and dense_mask"}, [&](auto& a) {
    a.dense_mask = dense({1, 1, 6, 5});
    a.mask = masks::full(6, 5);
  });
}

TEST_F(CallErrors, Plans) {
  const Plan other_lengths(masks::full(6, 6)), other_mask(masks::causal(6, 5)), causal(masks::causal(6, 5, 3));
  expect_backward({"plan was made for lengths (6, 6)", "(6, 5)"}, [&](auto& a) { a.plan = other_lengths.view(); });
  expect_backward({"plan was not made for this mask"}, [&](auto& a) { a.plan = other_mask.view(); });
  expect_backward({"plan was not made for this mask"}, [&](auto& a) {
    a.mask = masks::causal(6, 5);
    a.plan = causal.view();
  });
  // The mask's q_offset counts: with it, the other plan is the right one.
  call.mask = masks::causal(6, 5).with_q_offset(3);
  call.plan = causal.view();
  EXPECT_NO_THROW(call.run());
  call.plan = other_mask.view();
  expect_invalid({"plan was not made for this mask"}, [&] { call.forward(); });
}

TEST_F(CallErrors, Options) {
  const auto expect_options = [&](std::initializer_list<std::string> parts, Options options,
                                  ErrorCode code = ErrorCode::kInvalidArgument) {
    expect_error(code, parts, [&] { backward(args, {}, options); });
    expect_error(code, parts, [&] { backward_workspace(args, options); });
  };
  expect_options({"threads is -1"}, {.threads = -1});
  expect_options({"max_ctas is -1", "multiprocessor"}, {.max_ctas = -1});
  expect_options({"softmax_scale is inf", "finite"}, {.softmax_scale = INFINITY});
  expect_options({"softmax_scale", "finite"}, {.softmax_scale = NAN});
  expect_options({"softmax_scale is -0.3", "at least 0"}, {.softmax_scale = -0.3});
  for (const double softcap : {-1.0, 1e-19, 257.0, HUGE_VAL, std::nan("")})
    expect_options({"softcap is ", "it must be 0 (none) or between 1e-18 and 256"}, {.features = {.softcap = softcap}});
  expect_options({"dropout_p is 1", "less than 1"}, {.features = {.dropout = {.p = 1}}});
  expect_options({"dropout_p is nan"}, {.features = {.dropout = {.p = NAN}}});
  int anything = 0;
  expect_options({"stream must be null"}, {.stream = &anything}, ErrorCode::kUnsupported);
  expect_options({"stream must be null"}, {.stream = &anything, .backend = "reference"}, ErrorCode::kUnsupported);
}

TEST_F(CallErrors, SlopesOfAlibi) {
  const std::vector<float> slopes(8);
  call.options.features.alibi_slopes = Call<float>::view(slopes, {5});
  expect_backward({"alibi_slopes is float32 [5]", "float32 [4]", "batch, heads_q"}, [](auto&) {});
  call.options.features.alibi_slopes = Call<float>::view(slopes, {7, 4});
  expect_backward({"alibi_slopes is float32 [7, 4]", ", 4]", "batch, heads_q"}, [](auto&) {});
  call.options.features.alibi_slopes = Call<float>::view(slopes, {4});
  call.options.features.alibi_slopes.dtype = DataType::kBFloat16;
  expect_backward({"alibi_slopes is bfloat16 [4]", "float32 [4]"}, [](auto&) {});
}

TEST_F(CallErrors, SinkAndItsGradient) {
  const std::vector<float> logits(4);
  call.options.features.sink = Call<float>::view(logits, {5});
  expect_backward({"sink is float32 [5]", "float32 [4]", "heads_q"}, [](auto&) {});
  call.options.features.sink.dtype = DataType::kBFloat16;
  expect_backward({"sink is bfloat16 [5]", "float32 [4]"}, [](auto&) {});
  call.options.features.sink = Call<float>::view(logits, {4});
  expect_backward({"dsink is float32 [3]", "sink's shape"}, [&](auto& a) { a.dsink = Call<float>::view(logits, {3}); });
  expect_backward({"dsink is float64 [4]", "float32 [4]", "sink's shape and dtype"},
                  [&](auto& a) { a.dsink = TensorView::contiguous(logits.data(), DataType::kFloat64, {4}); });
  expect_backward({"dsink is an output", "stride 0"}, [&](auto& a) {
    a.dsink = Call<float>::view(logits, {4});
    a.dsink.stride[0] = 0;
  });
  call.options.features = {};
  expect_backward({"dsink is float32 [4]", "absent without sink"},
                  [&](auto& a) { a.dsink = Call<float>::view(logits, {4}); });
}

/// Every feature, asked for alone: an explanation lists it. What a backend refuses by name: device_test.cpp.
TEST_F(CallErrors, FeaturesAreExplained) {
  const std::vector<float> logits(4);
  const struct {
    std::string name;
    Features features;
  } asked[] = {
      {"softcap", {.softcap = 30}},           {"sink", {.sink = Call<float>::view(logits, {4})}},
      {"dropout", {.dropout = {.p = 0.1}}},   {"alibi_slopes", {.alibi_slopes = Call<float>::view(logits, {4})}},
      {"partial_out", {.partial_out = true}}, {"split_size", {.split_size = 128}},
  };
  for (const auto& [name, features] : asked) {
    SCOPED_TRACE(name);
    EXPECT_EQ(names(features), std::vector{name});
    for (const std::string backend : {"cpu", "reference"}) {
      const Options options{.features = features, .backend = backend};
      const Explanation why = explain(args, options);
      EXPECT_EQ(why.features, std::vector{name});
      EXPECT_EQ(why.backend, name == "split_size" && backend == "reference" ? "" : backend);
      EXPECT_NE(to_json(why).find("\"features\": [\"" + name + "\"]"), std::string::npos) << to_json(why);
    }
  }
  EXPECT_TRUE(names(Features{}).empty());
  EXPECT_TRUE(explain(args).features.empty());
}

TEST_F(CallErrors, Arrivals) {
  std::vector<int32_t> needed(4), state(2);
  ForwardArgs forward = call.forward_args();
  const auto view = [](std::vector<int32_t>& of, std::initializer_list<int64_t> shape) {
    return TensorView::contiguous(of.data(), DataType::kInt32, shape);
  };
  const auto expect_forward = [&](ErrorCode code, std::initializer_list<std::string> parts, const Arrivals& arrivals) {
    forward.arrivals = arrivals;
    expect_error(code, parts, [&] { forward_workspace(forward, call.options); });
  };
  const Arrivals right{.needed = view(needed, {1, 1}), .state = view(state, {2})};
  const auto changed = [&right](auto&& change) {
    Arrivals arrivals = right;
    change(arrivals);
    return arrivals;
  };
  const auto expect_wrong = [&](std::initializer_list<std::string> parts, auto&& change) {
    expect_forward(ErrorCode::kInvalidArgument, parts, changed(change));
  };
  expect_wrong({"needed has 3 batch entries", "1 or q's batch, 2"}, [&](auto& a) { a.needed = view(needed, {3, 1}); });
  expect_wrong({"needed", "int32 [1, 2]", "[1, 1]"}, [&](auto& a) { a.needed = view(needed, {1, 2}); });
  expect_wrong({"needed", "float32"}, [](auto& a) { a.needed.dtype = DataType::kFloat32; });
  expect_wrong({"state", "int32 [1]", "[2]"}, [&](auto& a) { a.state = view(state, {1}); });
  expect_wrong({"state", "absent"}, [](auto& a) { a.state = {}; });
  expect_wrong({"needed", "absent"}, [](auto& a) { a.needed = {}; });
  for (const double wrong : {0.0, -1.0, 2e6, std::numeric_limits<double>::quiet_NaN()})
    expect_wrong({"timeout is ", "above 0 and at most 1e+06 seconds"}, [&](auto& a) { a.timeout = wrong; });
  for (const std::string backend : {"cpu", "reference"}) {
    call.options.backend = backend;
    expect_forward(ErrorCode::kUnsupported, {backend, "keys arrive", "backend 'cuda' alone takes them"}, right);
  }
}

TEST_F(CallErrors, EarlyKeys) {
  // The call has 5 keys: all of them are early, or none.
  std::vector<float> gradients(2 * 5 * 2 * 8);
  const auto view = [&](std::initializer_list<int64_t> shape) { return Call<float>::view(gradients, shape); };
  const EarlyKeys right{.dk = view({2, 5, 2, 8}), .dv = view({2, 5, 2, 3}), .event = gradients.data()};
  const auto give = [&](const EarlyKeys& early) {
    return [&call = call, early](auto& a) {
      a.early = early;
      a.dk = Call<float>::view(call.dk, {2, 0, 2, 8});
      a.dv = Call<float>::view(call.dv, {2, 0, 2, 3});
    };
  };
  expect_backward({"early keys are given without partial_out"}, give(right));
  call.options.features.partial_out = true;
  const auto expect_wrong = [&](std::initializer_list<std::string> parts, auto&& change) {
    EarlyKeys early = right;
    change(early);
    expect_backward(parts, give(early));
  };
  expect_wrong({"early dk is of 4 keys of 5", "a multiple of 128"}, [&](auto& e) { e.dk = view({2, 4, 2, 8}); });
  expect_wrong({"early dk", "[2, 5, 2, 7]"}, [&](auto& e) { e.dk = view({2, 5, 2, 7}); });
  expect_wrong({"early dv", "absent"}, [](auto& e) { e.dv = {}; });
  expect_wrong({"early dk", "4 dimensions"}, [](auto& e) { e.dk.rank = 3; });
  expect_backward({"dk", "[2, 5, 2, 8]", "[2, 0, 2, 8]"}, [&](auto& a) { a.early = right; });
  for (const std::string backend : {"cpu", "reference"}) {
    call.options.backend = backend;
    expect_backward({backend, "come early", "backend 'cuda' alone has them"}, give(right), ErrorCode::kUnsupported);
  }
}

TEST_F(CallErrors, SplitSize) {
  for (const int64_t wrong : {int64_t{-128}, int64_t{64}, int64_t{100}, int64_t{1} << 31}) {
    call.options.features = {.split_size = wrong};
    expect_backward({"split_size is " + std::to_string(wrong), "0 (none) or a multiple of 128"}, [](auto&) {});
  }
  call.options.features = {.dropout = {.p = 0.5}, .split_size = 128};
  expect_error(ErrorCode::kUnsupported, {"cpu: dropout is not taken beside split_size"},
               [&] { forward_workspace(call.forward_args(), call.options); });
  call.options = {.features = {.split_size = 128}, .backend = "reference"};
  expect_error(ErrorCode::kUnsupported, {"reference: split_size is 128; backends 'cpu' and 'cuda' take it"},
               [&] { forward_workspace(call.forward_args(), call.options); });
}

TEST_F(CallErrors, WorkspaceTooSmallAndNothingWritten) {
  const std::size_t need = forward_workspace(call.forward_args(), call.options);
  ASSERT_GT(need, 0u);
  std::vector<std::byte> workspace(need - 1);
  expect_invalid({"workspace has " + std::to_string(need - 1) + " bytes", std::to_string(need)},
                 [&] { forward(call.forward_args(), workspace, call.options); });
  for (const float x : call.out) EXPECT_TRUE(std::isnan(x));
}

TEST_F(CallErrors, WorkspaceNeedsNoData) {
  BackwardArgs shapes = args;
  for (TensorView* t :
       {&shapes.q, &shapes.k, &shapes.v, &shapes.out, &shapes.lse, &shapes.dout, &shapes.dq, &shapes.dk, &shapes.dv})
    t->data = nullptr;
  EXPECT_EQ(backward_workspace(shapes, call.options), backward_workspace(args, call.options));
}

}  // namespace
}  // namespace flashmask::test
