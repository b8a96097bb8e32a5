// SPDX-License-Identifier: Apache-2.0
//
// The biases of query rows, as a step of a product, against arithmetic in double.
#include "backends/cuda/sm90/backward/row_bias.cuh"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <random>
#include <vector>

#include "backends/cuda/ptx/tma.cuh"
#include "device_vector.h"

namespace flashmask::sm90::bwd {
namespace {

constexpr int kKeys = 64;

/// scores [kKeys, kRows] = `before` + the rows' biases, by one warpgroup, with ones from registers or from shared
/// memory. kTerm: the rows have a float term of lse beside delta's bias.
template <Bias kBias, int kRows, bool kSharedOnes, bool kTerm>
__global__ void add_biases(const float* lse, const float* delta, float scale, float before, float* scores) {
  __shared__ alignas(128) RowBias biases[kRows];
  __shared__ ScoreOnes ones;
  if (threadIdx.x == 0) ones.fill();
  for (int row = threadIdx.x; row < kRows; row += blockDim.x)
    biases[row] = kTerm ? row_term_and_bias(lse[row], delta[row]) : row_bias(lse[row], delta[row], scale);
  ptx::fence_async_proxy();
  __syncthreads();
  float own[kRows / 2];
  for (float& score : own) score = before;
  ptx::pin(own);
  const auto step = [&] {
    if constexpr (kSharedOnes) {
      return SharedBiasStep<kRows>(ptx::shared_address(biases), ptx::shared_address(&ones));
    } else {
      return BiasStep<kRows>(ptx::shared_address(biases), bias_ones<kBias>());
    }
  }();
  ptx::wgmma_fence();
  step.issue(own);
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::pin(own);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int i = 0; i < kRows / 2; ++i) {
    scores[(16 * warp + lane / 4 + 8 * (i / 2 % 2)) * kRows + i / 4 * 8 + 2 * (lane % 4) + i % 2] = own[i];
  }
}

/// The rows' float terms of lse, read back.
__global__ void read_terms(const float* lse, float* terms, int rows) {
  const int row = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (row < rows) terms[row] = folded_score_term(row_term_and_bias(lse[row], 1));
}

template <int kRows>
struct Rows {
  std::vector<float> lse = std::vector<float>(kRows), delta = std::vector<float>(kRows);

  explicit Rows(unsigned seed) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal;
    for (float& x : lse) x = 10 * normal(generator);
    for (float& x : delta) x = std::exp(3 * normal(generator)) * (generator() % 2 ? 1 : -1);
  }

  /// [kKeys, kRows].
  template <Bias kBias, bool kSharedOnes = false, bool kTerm = false>
  std::vector<float> scores(float scale, float before) const {
    test::DeviceVector<float> device_lse(lse), device_delta(delta), scores(std::vector<float>(kKeys * kRows, NAN));
    add_biases<kBias, kRows, kSharedOnes, kTerm>
        <<<1, 128>>>(device_lse.data(), device_delta.data(), scale, before, scores.data());
    return scores.to_host();
  }
};

class RowBiases : public ::testing::Test {
 protected:
  void SetUp() override { FLASHMASK_NEEDS_GPU(); }
};

template <Bias kBias, int kRows, bool kSharedOnes = false, bool kTerm = false>
void expect_sums(unsigned seed, float scale, float before) {
  const Rows<kRows> rows(seed);
  const std::vector<float> scores = rows.template scores<kBias, kSharedOnes, kTerm>(scale, before);
  for (int n = 0; n < kKeys * kRows; ++n) {
    const int row = n % kRows;
    const double bias = kBias == Bias::kScore ? -double(rows.lse[row]) / scale : -double(rows.delta[row]);
    ASSERT_NEAR(scores[n], before + bias, std::ldexp(std::max(std::abs(bias), std::abs(double(before))), -21))
        << "row " << row;
  }
}

TEST_F(RowBiases, AreAddedToEveryKeysScores) {
  for (const float scale : {0.088388f, 1.f, 0.2f, 1e-30f}) {
    for (const float before : {0.f, 50.f, -3.f}) {
      expect_sums<Bias::kScore, 64>(1, scale, before);
      expect_sums<Bias::kScore, 128>(2, scale, before);
      expect_sums<Bias::kScore, 64, true>(5, scale, before);
      expect_sums<Bias::kGradient, 32>(6, scale, before);
      expect_sums<Bias::kGradient, 64>(3, scale, before);
      expect_sums<Bias::kGradient, 128>(4, scale, before);
      expect_sums<Bias::kGradient, 32, false, true>(7, scale, before);
      expect_sums<Bias::kGradient, 128, false, true>(8, scale, before);
    }
  }
}

TEST_F(RowBiases, OfARowThatSeesNothingMakeItsProbabilitiesZeroAndItsDeltaNothing) {
  constexpr int kRow = 37;
  for (const float scale : {0.088388f, 0.2f, 1e-30f}) {
    Rows<64> rows(5);
    rows.lse[kRow] = -INFINITY;
    rows.delta[kRow] = NAN;
    const std::vector<float> s = rows.scores<Bias::kScore>(scale, 100), dp = rows.scores<Bias::kGradient>(scale, 100);
    EXPECT_EQ((rows.scores<Bias::kScore, true>(scale, 100)), s);
    for (int key = 0; key < kKeys; ++key) {
      const int n = key * 64 + kRow;
      EXPECT_EQ(std::exp2(s[n] * scale), 0) << s[n];
      EXPECT_EQ(dp[n], 100);
      EXPECT_TRUE(std::isfinite(s[n - 1]) && std::isfinite(s[n + 1]));
    }
  }
}

TEST_F(RowBiases, BesideAFloatTermKeepBothWhateverTheFloatsBits) {
  constexpr int kRows = 128;
  constexpr float kLog2E = 1.44269504F;
  Rows<kRows> rows(9);
  std::mt19937 generator(9);
  std::normal_distribution<float> normal;
  for (float& lse : rows.lse) {
    constexpr uint32_t kInfinity = 0x7f80;  // in the lower half, which is infinite or NaN as a bfloat16
    while ((std::bit_cast<uint32_t>(-lse * kLog2E) & kInfinity) != kInfinity) lse = 10 * normal(generator);
  }
  const std::vector<float> dp = rows.scores<Bias::kGradient, false, true>(1, 0);
  for (int n = 0; n < kKeys * kRows; ++n)
    ASSERT_NEAR(dp[n], -rows.delta[n % kRows], std::ldexp(std::abs(rows.delta[n % kRows]), -21)) << n;
  rows.lse[0] = -INFINITY;
  test::DeviceVector<float> lse(rows.lse), terms(std::vector<float>(kRows, NAN));
  read_terms<<<1, kRows>>>(lse.data(), terms.data(), kRows);
  const std::vector<float> read = terms.to_host();
  EXPECT_EQ(std::exp2(read[0]), 0);
  for (int row = 1; row < kRows; ++row) EXPECT_EQ(read[row], -rows.lse[row] * kLog2E) << row;
}

TEST_F(RowBiases, NaNStaysInItsRow) {
  constexpr int kRow = 5;
  Rows<64> rows(6);
  rows.lse[kRow] = NAN;
  const std::vector<float> s = rows.scores<Bias::kScore>(0.1f, 1);
  for (int n = 0; n < kKeys * 64; ++n) ASSERT_EQ(std::isnan(s[n]), n % 64 == kRow) << n;
}

}  // namespace
}  // namespace flashmask::sm90::bwd
