// SPDX-License-Identifier: Apache-2.0
//
// Kernels of other policies than the library's (kernels.h) against the library's own: where the policy only says
// otherwise where something lies, or scales by powers of two, bit for bit; else by the accuracy rule, errors of at most
// twice the library's.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "backends/cuda/sm90/common/tensor_map.h"
#include "flashmask/attention.h"
#include "gpu/device_vector.h"
#include "gpu/kernel_cases.h"
#include "gpu/policies/calls.h"
#include "gpu/policies/gradients.h"
#include "gpu/policies/kernels.h"

namespace flashmask::test {
namespace {

constexpr double kAccuracyFactor = 2, kAccuracySlack = 1e-5, kLseLimit = 2e-4;

class Policies : public ::testing::Test {
 protected:
  void SetUp() override { FLASHMASK_NEEDS_GPU(); }
};

/// Asserts that a kernel's out and lse are the library's, bit for bit.
void expect_same_bits(const ForwardRun& got, const DeviceTensor& out, const DeviceLse& lse) {
  EXPECT_EQ(got.out.bits(), out.bits());
  const auto a = got.lse.values.to_host(), b = lse.values.to_host();
  EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)), 0);
}

/// The largest error of a head's elements; `values` [batch, seqlen, heads, dim].
std::vector<double> head_errors(const std::vector<double>& values, const std::vector<double>& exact, int64_t heads) {
  std::vector<double> errors(static_cast<std::size_t>(heads), 0.);
  for (std::size_t n = 0; n < values.size(); ++n) {
    const double error = std::abs(values[n] - exact[n]);
    if (std::isnan(error)) return std::vector<double>(errors.size(), error);
    double& largest = errors[n / kDim % errors.size()];
    largest = std::max(largest, error);
  }
  return errors;
}

/// The accuracy rule.
void expect_accurate(const char* what, const std::vector<double>& got, const std::vector<double>& library,
                     const std::vector<double>& exact, int64_t heads) {
  const auto errors = head_errors(got, exact, heads), allowed = head_errors(library, exact, heads);
  for (std::size_t head = 0; head < errors.size(); ++head)
    EXPECT_LE(errors[head], kAccuracyFactor * allowed[head] + kAccuracySlack) << what << " of head " << head;
}

// --- Epilogue ----------------------------------------------------------------------------------------

/// fp32 rows and lse of the keys that a mask leaves, on the host.
struct Partial {
  std::vector<float> out, lse;

  Partial(ForwardRun& run, const MaskParts& parts) {
    const DeviceMaskAndPlan mask(parts);
    const Kernel kernel = partial_rows_kernel();
    const DeviceVector<float> rows(std::vector<float>(kBatch * kHeads * kSeqlenQ * kDim, NAN));
    PartialRowsParams params{};
    check(cudaMemset(run.counter.data(), 0, sizeof(uint32_t)));
    run.set(params, kernel, mask);
    params.partial = rows.data();
    launch(kernel, kCtas, &params);
    out = rows.to_host();
    lse = run.lse.values.to_host();
  }
  float element(int64_t b, int64_t i, int64_t head, int64_t d) const {
    return out[static_cast<std::size_t>(((b * kHeads + head) * kSeqlenQ + i) * kDim + d)];
  }
  double weight(std::size_t row, double of) const {
    return lse[row] == -INFINITY ? 0 : std::exp(static_cast<double>(lse[row]) - of);
  }
};

/// merge_attention of two parts, in float64: out [batch, seqlen_q, heads, dim], lse [batch, heads, seqlen_q].
struct Merged {
  std::vector<double> out, lse;

  Merged(const Partial& a, const Partial& b) {
    for (std::size_t row = 0; row < a.lse.size(); ++row) {
      const double most = std::max(a.lse[row], b.lse[row]);
      lse.push_back(most == -INFINITY ? most : most + std::log(a.weight(row, most) + b.weight(row, most)));
    }
    for (int64_t entry = 0; entry < kBatch; ++entry) {
      for (int64_t i = 0; i < kSeqlenQ; ++i) {
        for (int64_t head = 0; head < kHeads; ++head) {
          const auto row = static_cast<std::size_t>((entry * kHeads + head) * kSeqlenQ + i);
          for (int64_t d = 0; d < kDim; ++d)
            out.push_back(a.weight(row, lse[row]) * a.element(entry, i, head, d) +
                          b.weight(row, lse[row]) * b.element(entry, i, head, d));
        }
      }
    }
  }
};

/// The library's out and lse, and those of the oracle.
struct Expected {
  DeviceTensor out{kSeqlenQ, kHeads};
  DeviceLse lse;
  std::vector<double> exact_out = std::vector<double>(kBatch * kSeqlenQ * kHeads * kDim),
                      exact_lse = std::vector<double>(kBatch * kHeads * kSeqlenQ);

  Expected(Attention& a, const MaskParts& parts) {
    const DeviceMaskAndPlan mask(parts);
    a.run(a.q, mask.mask, out, lse);
    ForwardArgs args;
    args.q = a.q.values(), args.k = a.k.values(), args.v = a.v.values(), args.mask = Mask(parts);
    args.out = TensorView::contiguous(exact_out.data(), DataType::kFloat64, {kBatch, kSeqlenQ, kHeads, kDim});
    args.lse = TensorView::contiguous(exact_lse.data(), DataType::kFloat64, {kBatch, kHeads, kSeqlenQ});
    forward(args, {}, {.softmax_scale = kScale, .backend = "reference"});
  }
};

TEST_F(Policies, PartialRowsRoundToTheFinalOnes) {
  Attention a;
  for (const MaskParts& parts : {all_keys(), last_keys()}) {
    const DeviceMaskAndPlan mask(parts);
    DeviceTensor out(kSeqlenQ, kHeads);
    DeviceLse lse;
    a.run(a.q, mask.mask, out, lse);
    ForwardRun run(a);
    const Partial partial(run, parts);
    std::vector<uint16_t> rounded;
    for (int64_t b = 0; b < kBatch; ++b) {
      for (int64_t i = 0; i < kSeqlenQ; ++i) {
        for (int64_t head = 0; head < kHeads; ++head) {
          for (int64_t d = 0; d < kDim; ++d) rounded.push_back(to_bits(kType, partial.element(b, i, head, d)));
        }
      }
    }
    EXPECT_EQ(rounded, out.bits());
    const auto expected = lse.values.to_host();
    EXPECT_EQ(std::memcmp(partial.lse.data(), expected.data(), expected.size() * sizeof(float)), 0);
  }
}

/// The rows from kAlone on see nothing of the second part.
TEST_F(Policies, PartialRowsOfTwoPartsMergeToAll) {
  Attention a;
  const Expected expected(a, all_keys());
  ForwardRun run(a);
  const Partial first(run, make_parts(seen_alone)), second(run, make_parts([](int64_t j) { return !seen_alone(j); }));
  const Merged merged(first, second);
  expect_accurate("out", merged.out, expected.out.values(), expected.exact_out, kHeads);
  for (std::size_t row = 0; row < merged.lse.size(); ++row) {
    if (expected.exact_lse[row] == -INFINITY) {
      EXPECT_EQ(merged.lse[row], -INFINITY) << "row " << row;
    } else {
      EXPECT_NEAR(merged.lse[row], expected.exact_lse[row], kLseLimit) << "row " << row;
    }
  }
}

// --- Score -------------------------------------------------------------------------------------------

TEST_F(Policies, HeadFactorIsAScaledQ) {
  Attention a;
  const DeviceVector<float> factors(std::vector<float>(std::begin(kFactors), std::end(kFactors)));
  for (const MaskParts& parts : {all_keys(), last_keys()}) {
    const DeviceMaskAndPlan mask(parts);
    DeviceTensor out(kSeqlenQ, kHeads);
    DeviceLse lse;
    a.run(a.q.scaled(), mask.mask, out, lse);
    ForwardRun run(a);
    const Kernel kernel = head_factor_kernel();
    HeadFactorParams params{};
    run.set(params, kernel, mask);
    params.factors = factors.data();
    launch(kernel, kCtas, &params);
    expect_same_bits(run, out, lse);
  }
}

void expect_accurate_gradients(const Gradients& got, Backward& backward) {
  const Gradients exact = backward.oracle(), library = backward.library();
  expect_accurate("dq", got.dq, library.dq, exact.dq, kHeads);
  expect_accurate("dk", got.dk, library.dk, exact.dk, kHeadsKv);
  expect_accurate("dv", got.dv, library.dv, exact.dv, kHeadsKv);
}

TEST_F(Policies, HeadFactorsGradientIsThatOfAScaledQ) {
  Attention a;
  Backward backward(a);
  expect_accurate_gradients(backward.head_factor(), backward);
}

}  // namespace
}  // namespace flashmask::test
