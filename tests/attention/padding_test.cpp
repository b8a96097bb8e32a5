// SPDX-License-Identifier: Apache-2.0

// Rows and keys past a batch entry's visible extent count as zeros, whatever memory holds there.

#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "attention/compare.h"
#include "flashmask/plan.h"
#include "support/extent.h"

namespace flashmask::test {
namespace {

constexpr int64_t kBatch = 2, kRows = 200, kKeys = 330;
constexpr VisibleExtent kExtents[kBatch] = {{131, 130}, {70, 257}};

/// Each batch entry sees its first keys from its first rows, of two heads the second one less.
Mask padded_mask(bool by_positions) {
  MaskParts parts{.seqlen_q = kRows, .seqlen_k = kKeys, .batch = kBatch, .heads = 2};
  for (const VisibleExtent& extent : kExtents) {
    for (const int32_t less : {0, 3}) {
      for (int32_t key = 0; key < kKeys; ++key) parts.lts.push_back(key < extent.keys - less ? extent.rows - less : 0);
    }
  }
  if (!by_positions) return Mask(parts);
  parts.position_batch = 1;
  for (int32_t row = 0; row < kRows; ++row) parts.q_pos.push_back(row % 7);
  for (int32_t key = 0; key < kKeys; ++key) parts.k_pos.push_back(key % 5 - 3);
  parts.band = Band{.lo = std::nullopt, .hi = 3};
  return Mask(parts);
}

Call<float> padded_call(const Mask& mask, const char* backend, double softcap) {
  Call<float> call({.batch = kBatch,
                    .seqlen_q = kRows,
                    .seqlen_k = kKeys,
                    .heads_q = 4,
                    .heads_kv = 2,
                    .head_dim = 20,
                    .head_dim_v = 12});
  call.add_sink();
  call.with_dlse = true;
  call.mask = mask;
  call.options.backend = backend;
  call.options.features.softcap = softcap;
  return call;
}

/// Writes `value` to what lies past the extents in a tensor [kBatch, seqlen, ...].
void fill_padding(std::vector<float>& tensor, int64_t seqlen, int32_t VisibleExtent::* end, float value) {
  const std::size_t row = tensor.size() / static_cast<std::size_t>(kBatch * seqlen);
  for (int64_t b = 0; b < kBatch; ++b) {
    const auto first = tensor.begin() + (b * seqlen + kExtents[b].*end) * static_cast<int64_t>(row);
    std::fill(first, tensor.begin() + (b + 1) * seqlen * static_cast<int64_t>(row), value);
  }
}

void fill_padding(Call<float>& call, float value) {
  for (auto* tensor : {&call.q, &call.dout}) fill_padding(*tensor, kRows, &VisibleExtent::rows, value);
  for (auto* tensor : {&call.k, &call.v}) fill_padding(*tensor, kKeys, &VisibleExtent::keys, value);
}

TEST(Padding, CountsAsZeros) {
  for (const bool by_positions : {false, true}) {
    const Mask mask = padded_mask(by_positions);
    const Plan plan(mask);
    for (int64_t b = 0; b < kBatch; ++b) ASSERT_EQ(plan.view().extent(b), kExtents[b]);
    for (const char* backend : {"cpu", "reference"}) {
      for (const double softcap : {0.0, 5.0}) {
        Call<float> zeros = padded_call(mask, backend, softcap);
        fill_padding(zeros, 0);
        zeros.run();
        expect_matches_oracle(zeros, dense_of(mask), kBatch, 2);
        for (const float value : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
          Call<float> call = padded_call(mask, backend, softcap);
          fill_padding(call, value);
          call.run();
          EXPECT_TRUE(same_bits(call, zeros)) << backend << ", softcap " << softcap << ", padding " << value;
        }
      }
    }
  }
}

/// The plan that a call makes and one that it is given say the same.
TEST(Padding, IsKnownFromAGivenPlan) {
  const Mask mask = padded_mask(false);
  const Plan plan(mask);
  Call<float> zeros = padded_call(mask, "cpu", 0);
  fill_padding(zeros, 0);
  zeros.run();
  Call<float> call = padded_call(mask, "cpu", 0);
  fill_padding(call, std::numeric_limits<float>::quiet_NaN());
  call.plan = plan.view();
  call.run();
  EXPECT_TRUE(same_bits(call, zeros));
}

}  // namespace
}  // namespace flashmask::test
