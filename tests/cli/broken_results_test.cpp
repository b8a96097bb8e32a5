// SPDX-License-Identifier: Apache-2.0
// A check that cannot fail checks nothing: backends that are wrong in one way each must be found out.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <limits>
#include <stdexcept>

#include "numerics/number.h"
#include "verify/run_case.h"

namespace flashmask::verify {
namespace {

std::string tested_backend() {
  for (const BackendInfo& backend : backends()) {
    if (backend.name == "cpu" && backend.usable) return "cpu";
  }
  return "reference";
}

using ForwardChange = std::function<void(const ForwardArgs&, std::span<std::byte>, const Options&)>;
using BackwardChange = std::function<void(const BackwardArgs&, std::span<std::byte>, const Options&)>;

/// The library's functions, and then a change.
RunOptions broken_forward(ForwardChange change) {
  RunOptions options{.backend = tested_backend()};
  options.implementation.forward = [change](const ForwardArgs& args, std::span<std::byte> workspace,
                                            const Options& call) {
    flashmask::forward(args, workspace, call);
    change(args, workspace, call);
  };
  return options;
}

RunOptions broken_backward(BackwardChange change) {
  RunOptions options{.backend = tested_backend()};
  options.implementation.backward = [change](const BackwardArgs& args, std::span<std::byte> workspace,
                                             const Options& call) {
    flashmask::backward(args, workspace, call);
    change(args, workspace, call);
  };
  return options;
}

/// Offset of an element of [batch, seqlen, heads, dim].
int64_t element(const TensorView& t, int64_t b, int64_t s, int64_t h, int64_t d) {
  return b * t.stride[0] + s * t.stride[1] + h * t.stride[2] + d * t.stride[3];
}

double get(const TensorView& t, int64_t offset) { return numerics::load(t.dtype, t.data, offset); }
void set(const TensorView& t, int64_t offset, double value) { numerics::store(t.dtype, t.data, offset, value); }

Case tested_case(DataType dtype) {
  Case c{.batch = 2,
         .seqlen_q = 100,
         .seqlen_k = 140,
         .heads_q = 4,
         .heads_kv = 2,
         .head_dim = 32,
         .head_dim_v = 24,
         .dtype = dtype};
  c.family = "causal_document";
  c.layout = Layout::kPadded;
  c.seed = 5;
  return c;
}

/// The case fails, and a failure has this text.
void expect_found(const Case& c, const RunOptions& options, const std::string& part) {
  const Verdict verdict = run_case(c, options);
  EXPECT_FALSE(verdict.passed());
  bool found = false;
  std::string all;
  for (const std::string& failure : verdict.failures) {
    found = found || failure.find(part) != std::string::npos;
    all += failure + "\n";
  }
  EXPECT_TRUE(found) << "no failure says '" << part << "':\n" << all;
}

class BrokenResults : public testing::TestWithParam<DataType> {
 protected:
  const Case c = tested_case(GetParam());
  /// Larger than what the accuracy rule allows for values around 1.
  const double error = GetParam() == DataType::kFloat32 ? 1e-3 : 0.1;
};

INSTANTIATE_TEST_SUITE_P(Dtypes, BrokenResults,
                         testing::Values(DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16),
                         [](const auto& dtype) { return std::string(name(dtype.param)); });

TEST_P(BrokenResults, NothingIsFoundWhereNothingIsBroken) {
  const Verdict verdict = run_case(c, {.backend = tested_backend()});
  EXPECT_TRUE(verdict.passed()) << verdict.failures.front();
  for (const auto& [result, figure] : verdict.figures) EXPECT_LE(figure, 1) << result;
  EXPECT_EQ(verdict.figures.size(), 5u);
}

TEST_P(BrokenResults, OneWrongElementOfOut) {
  const auto change = [this](const ForwardArgs& args, auto, auto&) {
    const int64_t at = element(args.out, 1, 57, 3, 11);
    set(args.out, at, get(args.out, at) + error);
  };
  expect_found(c, broken_forward(change), "out: batch entry 1, head 3, row 57, column 11");
}

TEST_P(BrokenResults, TheGradientOfASink) {
  for (const SinkKind kind : {SinkKind::kFloat32, SinkKind::kOwn}) {
    Case with = c;
    with.features = {.sink = kind, .softcap = 20};
    const Verdict verdict = run_case(with, {.backend = tested_backend()});
    EXPECT_TRUE(verdict.passed()) << verdict.failures.front();
    EXPECT_EQ(verdict.figures.count("dsink"), 1u);
    const auto change = [](const BackwardArgs& args, auto, auto&) {
      const double unit = args.dsink.dtype == DataType::kBFloat16 ? 0.02 : 0.002;
      set(args.dsink, 2, get(args.dsink, 2) * (1 + unit));
    };
    expect_found(with, broken_backward(change), "dsink: batch entry 0, head 2");
    // A sink, or a cap, that the backend forgets.
    RunOptions without{.backend = tested_backend()};
    without.implementation.forward = [](const ForwardArgs& args, std::span<std::byte> workspace, Options call) {
      call.features.sink = {};
      flashmask::forward(args, workspace, call);
    };
    expect_found(with, without, "lse");
    without.implementation.forward = [](const ForwardArgs& args, std::span<std::byte> workspace, Options call) {
      call.features.softcap = 0;
      flashmask::forward(args, workspace, call);
    };
    with.given_scale = 1.5;
    expect_found(with, without, "out");
    // A backward that drops others than its forward.
    with.features = {.dropout = 0.3};
    EXPECT_TRUE(run_case(with, {.backend = tested_backend()}).passed());
    RunOptions other{.backend = tested_backend()};
    other.implementation.backward = [](const BackwardArgs& args, std::span<std::byte> workspace, Options call) {
      const uint64_t state[2] = {call.features.dropout.state[0], call.features.dropout.state[1] + 1};
      call.features.dropout.state = state;
      flashmask::backward(args, workspace, call);
    };
    expect_found(with, other, "dv");
  }
}

TEST_P(BrokenResults, RowsOfOneKeyUnderDropout) {
  // dq and dk are 0 but for the rounding of out, which delta inherits.
  Case one_key = c;
  one_key.family = "full";
  one_key.seqlen_q = 512;
  one_key.seqlen_k = 1;
  one_key.features = {.dropout = 0.4};
  const Verdict verdict = run_case(one_key, {.backend = tested_backend()});
  ASSERT_TRUE(verdict.passed()) << verdict.failures.front();
  const auto change = [this](const BackwardArgs& args, auto, auto&) {
    const int64_t at = element(args.dq, 1, 57, 3, 11);
    set(args.dq, at, get(args.dq, at) + error);
  };
  expect_found(one_key, broken_backward(change), "dq: batch entry 1, head 3");
}

TEST_P(BrokenResults, AHeadOfWhichFewRowsSeeKeys) {
  Case few = c;
  few.family = "causal";
  few.seqlen_q = 300;
  few.seqlen_k = 3;
  few.q_offset = -297;
  const RunOptions options{.backend = tested_backend()};
  const Verdict verdict = run_case(few, options);
  ASSERT_TRUE(verdict.passed()) << verdict.failures.front();
  const auto change = [this](const ForwardArgs& args, auto, auto&) {
    const int64_t at = element(args.out, 1, 299, 3, 11);
    set(args.out, at, get(args.out, at) + error);
  };
  expect_found(few, broken_forward(change), "out: batch entry 1, head 3, row 299, column 11");
}

TEST_P(BrokenResults, PositionsThatAreForgotten) {
  Case with = c;
  with.features.positions = Positions::kEach;
  ASSERT_TRUE(run_case(with, {.backend = tested_backend()}).passed());
  RunOptions without{.backend = tested_backend()};
  without.implementation.forward = [](const ForwardArgs& args, std::span<std::byte> workspace, const Options& call) {
    ForwardArgs other = args;
    if (other.mask) other.mask = other.mask->with_positions(std::vector<int32_t>{}, {});
    other.plan = {};
    flashmask::forward(other, workspace, call);
  };
  expect_found(with, without, "out");
}

TEST_P(BrokenResults, OneWrongElementOfAGradient) {
  const auto change = [this](TensorView BackwardArgs::* gradient) {
    return broken_backward([=, this](const BackwardArgs& args, auto, auto&) {
      const TensorView& t = args.*gradient;
      const int64_t at = element(t, 0, 33, 1, 5);
      set(t, at, get(t, at) + 4 * error);
    });
  };
  expect_found(c, change(&BackwardArgs::dq), "dq: batch entry 0, head 1, row 33, column 5");
  expect_found(c, change(&BackwardArgs::dk), "dk: batch entry 0, head 1, row 33, column 5");
  expect_found(c, change(&BackwardArgs::dv), "dv: batch entry 0, head 1, row 33, column 5");
}

TEST_P(BrokenResults, AGradientThatIsALittleTooLarge) {
  const auto change = [](const BackwardArgs& args, auto, auto&) {
    for (int64_t s = 0; s < args.dk.shape[1]; ++s) {
      for (int64_t d = 0; d < args.dk.shape[3]; ++d) {
        const int64_t at = element(args.dk, 1, s, 0, d);
        set(args.dk, at, 1.02 * get(args.dk, at));
      }
    }
  };
  expect_found(c, broken_backward(change), "dk: batch entry 1, head 0");
}

TEST_P(BrokenResults, AnElementThatWasNotWritten) {
  const auto change = [](const ForwardArgs& args, auto, auto&) {
    set(args.out, element(args.out, 0, 99, 0, 23), std::numeric_limits<double>::quiet_NaN());
  };
  expect_found(c, broken_forward(change), "out: batch entry 0, head 0, row 99, column 23: NaN");
}

TEST_P(BrokenResults, AWrongLse) {
  const auto change = [](const ForwardArgs& args, auto, auto&) {
    const int64_t at = 1 * args.lse.stride[0] + 2 * args.lse.stride[1] + 30;
    set(args.lse, at, get(args.lse, at) * 1.01 + 0.01);
  };
  expect_found(c, broken_forward(change), "lse: batch entry 1, head 2, row 30");
}

TEST_P(BrokenResults, AnotherMask) {
  const auto shifted = [](const AttentionInputs& inputs) {
    AttentionInputs other = inputs;
    if (other.mask) other.mask = other.mask->with_q_offset(other.mask->q_offset() + 1);
    return other;
  };
  RunOptions options{.backend = tested_backend()};
  options.implementation.forward = [&](const ForwardArgs& args, std::span<std::byte> workspace, const Options& call) {
    flashmask::forward({shifted(args), args.out, args.lse}, workspace, call);
  };
  expect_found(c, options, "out: ");
}

TEST_P(BrokenResults, AGradientThroughLseThatIsIgnored) {
  Case with_dlse = c;
  with_dlse.dlse = true;
  RunOptions options{.backend = tested_backend()};
  options.implementation.backward = [](BackwardArgs args, std::span<std::byte> workspace, const Options& call) {
    args.dlse = {};
    flashmask::backward(args, workspace, call);
  };
  expect_found(with_dlse, options, "dq: ");
}

TEST_P(BrokenResults, OtherBitsThanTheDenseRun) {
  // One bit of one element, in the run with the mask only: well within the accuracy rule.
  const auto change = [](const ForwardArgs& args, auto, auto&) {
    if (!args.mask) return;
    char* bytes = static_cast<char*>(args.out.data) +
                  element(args.out, 0, 40, 2, 3) * static_cast<int64_t>(element_size(args.out.dtype));
    bytes[0] = static_cast<char>(bytes[0] ^ 1);
  };
  expect_found(c, broken_forward(change), "they must have the same bits");
}

TEST_P(BrokenResults, AWriteBetweenTheRows) {
  const auto change = [](const BackwardArgs& args, auto, auto&) { set(args.dv, element(args.dv, 0, 12, 1, 24), 0); };
  expect_found(c, broken_backward(change), "dv: the run with the mask wrote outside of the tensor's elements");
}

TEST_P(BrokenResults, AWriteBehindTheWorkspace) {
  const auto change = [](auto&, std::span<std::byte> workspace, auto&) {
    *(workspace.data() + workspace.size()) = std::byte{0};
  };
  expect_found(c, broken_forward(change), "workspace: the run with the mask wrote outside of it");
  expect_found(c, broken_backward(change), "workspace: the run with the mask wrote outside of it");
}

TEST_P(BrokenResults, RowsAndKeysThatSeeNothing) {
  Case padded = c;
  padded.family = "padding";
  for (uint64_t seed = 0;; ++seed) {  // one with rows and keys that are hidden
    padded.seed = seed;
    const Mask mask = make_mask(padded);
    if (!mask.visible(0, 0, 99, 0) && !mask.visible(0, 0, 0, 139) && mask.visible(0, 0, 0, 0)) break;
  }
  ASSERT_TRUE(run_case(padded, {.backend = tested_backend()}).passed());
  const auto out = [](const ForwardArgs& args, auto, auto&) { set(args.out, element(args.out, 1, 99, 3, 0), 1e-7); };
  expect_found(padded, broken_forward(out), "out: batch entry 1, head 3, row 99: sees nothing, but is not exactly 0");
  const auto lse = [](const ForwardArgs& args, auto, auto&) {
    set(args.lse, args.lse.stride[0] + 3 * args.lse.stride[1] + 99, -1e30);
  };
  expect_found(padded, broken_forward(lse), "lse: batch entry 1, head 3, row 99");
  const auto dq = [](const BackwardArgs& args, auto, auto&) { set(args.dq, element(args.dq, 0, 99, 2, 4), 1e-7); };
  expect_found(padded, broken_backward(dq), "dq: batch entry 0, head 2, row 99: sees nothing");
  const auto dk = [](const BackwardArgs& args, auto, auto&) { set(args.dk, element(args.dk, 0, 139, 1, 4), 1e-7); };
  expect_found(padded, broken_backward(dk), "dk: batch entry 0, head 1, key 139: sees nothing");
}

TEST(BrokenBackend, OneThatThrows) {
  RunOptions options{.backend = tested_backend()};
  options.implementation.backward = [](auto&, auto, auto&) { throw std::runtime_error("no such luck"); };
  expect_found(tested_case(DataType::kFloat32), options, "threw: no such luck");
}

TEST(BrokenBackend, OneThatExecutesOtherTiles) {
  if (tested_backend() == "reference") GTEST_SKIP() << "the reference counts no tiles";
  const Case c = tested_case(DataType::kFloat32);
  expect_found(c, broken_forward([](auto&, auto, const Options& call) { ++call.executed_tiles->forward; }),
               "in the forward");
  expect_found(c, broken_backward([](auto&, auto, const Options& call) { --call.executed_tiles->backward_rows; }),
               "in the backward over rows");
  expect_found(c, broken_backward([](auto&, auto, const Options& call) { ++call.executed_tiles->backward_keys; }),
               "in the backward over keys");
}

TEST(BrokenBackend, ADenseRuleThatDisagreesWithTheMask) {
  const Case c = tested_case(DataType::kFloat32);
  RunOptions options{.backend = tested_backend()};
  options.dense = [](const Case& of) {
    DenseMask dense = dense_of(make_mask(of));
    auto first = std::find(dense.visible.begin(), dense.visible.end(), 1);
    *first = 0;
    return dense;
  };
  EXPECT_FALSE(run_case(c, options).passed());
}

TEST(RunCases, ReportsEachCaseOnceFromAnyNumberOfJobs) {
  std::vector<Case> cases;
  for (uint64_t seed = 0; seed < 9; ++seed) {
    cases.push_back(tested_case(DataType::kFloat32));
    cases.back().seed = seed;
    cases.back().head_dim = seed == 4 ? 300 : 16;  // one that no backend takes
  }
  for (const int jobs : {0, 1, 3, 20}) {
    std::vector<int> reports(cases.size()), failures(cases.size());
    run_cases(cases, {.backend = tested_backend()}, jobs, [&](std::size_t index, const Verdict& verdict) {
      ++reports[index];
      failures[index] += !verdict.passed();
    });
    EXPECT_EQ(reports, std::vector<int>(9, 1));
    EXPECT_EQ(failures, (std::vector<int>{0, 0, 0, 0, 1, 0, 0, 0, 0}));
  }
}

}  // namespace
}  // namespace flashmask::verify
