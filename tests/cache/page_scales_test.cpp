// SPDX-License-Identifier: Apache-2.0

// Appends that write scales of pages, compared with the rule as kv_cache.h writes it: over all of a page's tokens at
// once, in numbers.

#include <gtest/gtest.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <numeric>
#include <random>

#include "cache/cached_case.h"
#include "cache/page_scale.h"
#include "support/expect_error.h"

namespace flashmask::test {
namespace {

constexpr int64_t kPages = 3, kPageSize = 16, kHeads = 2, kDim = 8, kTokens = 40;
constexpr int32_t kTable[kPages] = {2, 0, 1};

Storage int32s(std::vector<int32_t> values) {
  Storage s(DataType::kInt32, {static_cast<int64_t>(values.size())});
  for (std::size_t n = 0; n < values.size(); ++n) s.set(static_cast<int64_t>(n), values[n]);
  return s;
}
int64_t slot_of(int64_t token) { return kTable[token / kPageSize] * kPageSize + token % kPageSize; }

/// Tokens of one request whose numbers come to be larger, [tokens, heads, dim].
Storage growing_tokens(uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  Storage x(DataType::kFloat32, {kTokens, kHeads, kDim});
  for (int64_t n = 0; n < x.view.num_elements(); ++n)
    x.set(n, normal(random) * std::exp2(static_cast<double>(n / (kHeads * kDim)) / 3 - 10));
  return x;
}

/// A cache of e4m3 with a request's tokens, v being k. `heads`: those that a scale of k is of, 1 or all.
struct Cache {
  Storage k{DataType::kFloat8E4M3, {kPages, kPageSize, kHeads, kDim}};
  Storage v{DataType::kFloat8E4M3, {kPages, kPageSize, kHeads, kDim}};
  Storage k_scale, v_scale;
  Storage table = int32s({kTable[0], kTable[1], kTable[2]}), seqlens = int32s({0});

  explicit Cache(int64_t heads = kHeads)
      : k_scale(DataType::kFloat32, {kPages, 1, heads}), v_scale(DataType::kFloat32, {kPages, kPageSize, kHeads}) {}

  AppendArgs args(const Storage& rows) {
    return {.k = rows.view,
            .v = rows.view,
            .cache = {.k = k.view,
                      .v = v.view,
                      .page_table = TensorView::contiguous(table.bytes.data(), DataType::kInt32, {1, kPages}),
                      .seqlens = seqlens.view,
                      .k_scale = k_scale.view,
                      .v_scale = v_scale.view},
            .write_scales = true};
  }
  /// Appends tokens [first, first + count) as the sequence's last ones.
  void append(const Storage& tokens, int64_t first, int64_t count) {
    const Storage ends = int32s({static_cast<int32_t>(first), static_cast<int32_t>(first + count)});
    seqlens.set(0, static_cast<double>(first + count));
    AppendArgs a = args(tokens);
    a.cu_seqlens = ends.view;
    append_kv(a);
  }
  /// Writes tokens into slots.
  void append(const Storage& tokens, std::vector<int32_t> into) {
    const Storage slots = int32s(std::move(into));
    AppendArgs a = args(tokens);
    a.k.shape[0] = a.v.shape[0] = slots.view.shape[0];
    a.slots = slots.view;
    append_kv(a);
  }
  uint8_t stored(int64_t slot, int64_t head, int64_t c) const {
    return reinterpret_cast<const uint8_t*>(k.bytes.data())[(slot * kHeads + head) * kDim + c];
  }
  double scale(int64_t page, int64_t head = 0) const { return k_scale.get(k_scale.at({page, 0, head})); }
};

/// Rows of one number each.
Storage rows_of(std::initializer_list<double> values) {
  Storage x(DataType::kFloat32, {static_cast<int64_t>(values.size()), kHeads, kDim});
  int64_t n = 0;
  for (const double value : values)
    for (int64_t c = 0; c < kHeads * kDim; ++c) x.set(n++, value);
  return x;
}

double least_power(double largest) {
  double scale = std::exp2(-126);
  while (largest > 448 * scale) scale *= 2;
  return scale;
}

TEST(PageScales, HalvesAreRoundedOnce) {
  for (int bits = 0; bits < 256; ++bits) {
    for (int times = 0; times < 40; ++times) {
      const auto x = static_cast<uint8_t>(bits);
      const int want = (bits & 0x7f) == 0x7f ? bits : float_to_float8_e4m3(std::ldexp(float8_e4m3_to_float(x), -times));
      ASSERT_EQ(halved_e4m3(x, times), want) << bits << " halved " << times << " times";
    }
  }
}

TEST(PageScales, TheLeastPowerOfTwoThatReaches) {
  for (const double largest : {0.0, 1e-45, 448 * 0x1p-126, 449 * 0x1p-126, 1.0, 447.9, 448.0,
                               std::nextafter(448.0, 449), 896.5, 65504.0, 3e37, double{FLT_MAX}}) {
    for (const float old : {0.0f, -1.0f, 7.0f, NAN})
      EXPECT_EQ(grown_page_scale(old, true, largest).scale, least_power(largest)) << largest;
  }
}

TEST(PageScales, DoNotDependOnHowTokensWereDivided) {
  const Storage tokens = growing_tokens(1);
  for (const int64_t heads : {int64_t{1}, kHeads}) {
    for (const int64_t step : {int64_t{1}, int64_t{7}, int64_t{16}, kTokens}) {
      Cache cache(heads);
      for (int64_t first = 0; first < kTokens; first += step)
        cache.append(tokens, first, std::min(step, kTokens - first));
      for (int64_t token = 0; token < kTokens; ++token) {
        const int64_t page = kTable[token / kPageSize], begin = token / kPageSize * kPageSize;
        for (int64_t head = 0; head < kHeads; ++head) {
          double largest = 0;
          for (int64_t j = begin; j < std::min(begin + kPageSize, kTokens); ++j) {
            for (int64_t h = heads == 1 ? 0 : head; h < (heads == 1 ? kHeads : head + 1); ++h) {
              for (int64_t c = 0; c < kDim; ++c)
                largest = std::max(largest, std::fabs(tokens.get(tokens.at({j, h, c}))));
            }
          }
          const double scale = least_power(largest);
          ASSERT_EQ(cache.scale(page, heads == 1 ? 0 : head), scale) << "token " << token << " in steps of " << step;
          for (int64_t c = 0; c < kDim; ++c) {
            const double x = tokens.get(tokens.at({token, head, c})) / scale;
            const uint8_t got = cache.stored(slot_of(token), head, c);
            if (step == kTokens || std::fabs(x) >= 0x1p-6) {
              ASSERT_EQ(got, float_to_float8_e4m3(static_cast<float>(x))) << token;
            } else {  // rounded more than once, to units of 2^-9
              ASSERT_NEAR(float8_e4m3_to_float(got), x, 0x1p-9) << token;
            }
          }
        }
      }
    }
  }
}

TEST(PageScales, OnesThatAreThereGrowByPowersOfTwo) {
  Cache cache(1);
  cache.append(rows_of({300}), {1});  // no number is there: it becomes 1, which is the least that takes 300
  EXPECT_EQ(cache.scale(0), 1);
  cache.k_scale.set(0, 0.75);
  const double before = float8_e4m3_to_float(cache.stored(1, 0, 0));
  EXPECT_EQ(before, 288);
  cache.append(rows_of({-330}), {3});  // 440 of it
  EXPECT_EQ(cache.scale(0), 0.75);
  EXPECT_EQ(float8_e4m3_to_float(cache.stored(1, 1, 2)), before);
  cache.append(rows_of({900, 2}), {4, 2});  // 1200
  EXPECT_EQ(cache.scale(0), 3);
  EXPECT_EQ(float8_e4m3_to_float(cache.stored(1, 1, 2)), before / 4);
  EXPECT_EQ(float8_e4m3_to_float(cache.stored(3, 0, 0)), -448.0 / 4);
  EXPECT_EQ(float8_e4m3_to_float(cache.stored(4, 0, 0)), 288);  // 300, by a scale of 3
  EXPECT_EQ(float8_e4m3_to_float(cache.stored(2, 0, 0)), 0.6875);
}

TEST(PageScales, ThePagesFirstSlotBeginsItAnew) {
  Cache cache(1);
  cache.append(rows_of({1e4, 1e4}), {0, 1});
  EXPECT_EQ(cache.scale(0), 32);
  const uint8_t before = cache.stored(1, 0, 0);
  cache.append(rows_of({2, 1, 3}), {7, 0, 16});
  EXPECT_EQ(cache.scale(0), 0x1p-7);
  EXPECT_EQ(cache.scale(1), 0x1p-7);
  EXPECT_EQ(float8_e4m3_to_float(cache.stored(0, 0, 0)), 128);
  EXPECT_EQ(float8_e4m3_to_float(cache.stored(7, 0, 0)), 256);
  EXPECT_EQ(cache.stored(1, 0, 0), before);  // void: the page holds what begins it
}

TEST(PageScales, WhatIsNotFiniteDoesNotCount) {
  Cache cache(1);
  cache.append(rows_of({NAN, 1, -HUGE_VAL, 1e-3}), {0, 1, 2, 3});
  EXPECT_EQ(cache.scale(0), 0x1p-8);
  EXPECT_EQ(cache.stored(0, 0, 0) & 0x7f, 0x7f);
  EXPECT_EQ(cache.stored(2, 0, 0), 0xfe);
  cache.append(rows_of({2}), {4});
  EXPECT_EQ(cache.scale(0), 0x1p-7);
  EXPECT_EQ(cache.stored(0, 0, 0) & 0x7f, 0x7f);
  EXPECT_EQ(float8_e4m3_to_float(cache.stored(1, 0, 0)), 128);
  EXPECT_EQ(float8_e4m3_to_float(cache.stored(2, 0, 0)), -224);
}

TEST(PageScales, ZerosCostNoDigits) {
  Cache cache(1);
  cache.append(rows_of({0, 0}), {0, 1});
  EXPECT_EQ(cache.scale(0), 0x1p-126);
  cache.append(rows_of({1e-5}), {2});
  EXPECT_EQ(cache.scale(0), least_power(1e-5));
  EXPECT_EQ(cache.stored(0, 0, 0), 0);
}

TEST(PageScales, BesideScalesOfTokens) {
  const Storage tokens = growing_tokens(2);
  Cache cache;
  for (int64_t first = 0; first < kTokens; first += 5) cache.append(tokens, first, 5);
  for (int64_t token = 0; token < kTokens; ++token) {
    for (int64_t h = 0; h < kHeads; ++h) {
      double largest = 0;
      for (int64_t c = 0; c < kDim; ++c) largest = std::max(largest, std::fabs(tokens.get(tokens.at({token, h, c}))));
      EXPECT_EQ(cache.v_scale.get(slot_of(token) * kHeads + h), static_cast<float>(largest / 448)) << token;
    }
  }
}

TEST(PageScales, Refusals) {
  const Storage rows = rows_of({1, 2, 3, 4});
  Cache cache;
  const Storage slots = int32s({0, 1, 2, 3}), of_heads(DataType::kFloat32, {kHeads}), of_all(DataType::kFloat32, {1});
  for (const Storage* shared : {&of_heads, &of_all}) {
    AppendArgs args = cache.args(rows);
    args.slots = slots.view;
    args.cache.v_scale = shared->view;
    expect_invalid({"write_scales is set and v_scale is shared by pages", "scales_of", "float32 [3, 1 or 16, 1 or 2]"},
                   [&] { append_kv(args); });
  }
  AppendArgs args = cache.args(rows);
  args.slots = slots.view;
  args.cache.k_scale = {};
  expect_invalid({"write_scales is set and k_scale is absent", "float32 [3, 1 or 16, 1 or 2]"},
                 [&] { append_kv(args); });
}

}  // namespace
}  // namespace flashmask::test
