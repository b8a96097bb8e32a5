// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "cache/cached_call.h"
#include "support/expect_error.h"

namespace flashmask::test {
namespace {

/// Rows to be appended: row x of head h is all x + 100 h in k, and its negative in v.
struct NewRows {
  Storage k, v;

  NewRows(int64_t rows, int64_t heads, int64_t dim, DataType dtype = DataType::kFloat32)
      : k(dtype, {rows, heads, dim}), v(dtype, {rows, heads, dim}) {
    for (int64_t x = 0; x < rows; ++x) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t c = 0; c < dim; ++c) {
          k.set(k.at({x, h, c}), static_cast<double>(x + 100 * h));
          v.set(v.at({x, h, c}), -static_cast<double>(x + 100 * h));
        }
      }
    }
  }
};

Storage int32s(std::initializer_list<int32_t> values) {
  Storage s(DataType::kInt32, {static_cast<int64_t>(values.size())});
  int64_t at = 0;
  for (const int32_t x : values) s.set(at++, x);
  return s;
}

float at(const TensorView& t, int64_t a, int64_t b, int64_t c) {
  return static_cast<const float*>(t.data)[a * t.stride[0] + b * t.stride[1] + c * t.stride[2]];
}

TEST(AppendKv, RowsBecomeTheLastTokens) {
  const CachedCase c({.keys = {20, 2, 0, 40}, .rows = {1, 1, 1, 1}}, 1);
  LaidOutCall call(c, {.page_size = 3});
  NewRows rows(7, 2, 24);
  const Storage cu = int32s({0, 2, 6, 7, 7});  // the second request has more rows than keys, the third no key
  append_kv({.k = rows.k.view, .v = rows.v.view, .cu_seqlens = cu.view, .cache = call.args.cache});
  for (const auto& [b, j, row] : {std::array<int64_t, 3>{0, 18, 0}, {0, 19, 1}, {1, 0, 4}, {1, 1, 5}}) {
    const auto [page, slot] = call.place(b, j);
    EXPECT_EQ(at(call.args.cache.k, page, slot, 1), static_cast<float>(row + 100)) << b << " " << j;
    EXPECT_EQ(at(call.args.cache.v, page, slot, 0), static_cast<float>(-row)) << b << " " << j;
  }
  const auto [page, slot] = call.place(0, 17);
  EXPECT_NE(at(call.args.cache.k, page, slot, 1), 99.0f);
}

TEST(AppendKv, SlotsAndOnesThatAreSkipped) {
  const CachedCase c({}, 2);
  LaidOutCall call(c, {.page_size = 16});
  NewRows rows(4, 2, 24);
  const auto pages = static_cast<int32_t>(call.args.cache.k.shape[0]);
  const Storage slots = int32s({-1, 16 * 2 + 5, 16 * pages, 0});
  append_kv({.k = rows.k.view, .v = rows.v.view, .slots = slots.view, .cache = call.args.cache});
  EXPECT_EQ(at(call.args.cache.k, 2, 5, 0), 1.0f);
  EXPECT_EQ(at(call.args.cache.k, 0, 0, 1), 103.0f);
}

TEST(AppendKv, BoundsGoToTheMask) {
  for (const bool in_pages : {true, false}) {
    const CachedCase c({.keys = {20, 9}, .rows = {1, 1}, .vectors = 2}, 3);
    LaidOutCall call(c, {.page_size = 16, .in_pages = in_pages});
    NewRows rows(3, 2, 24);
    const Storage cu = int32s({0, 1, 3});
    Storage bounds(DataType::kInt32, {3, 1, 2});
    for (int64_t x = 0; x < 6; ++x) bounds.set(x, static_cast<double>(1000 + x));
    append_kv({.k = rows.k.view,
               .v = rows.v.view,
               .cu_seqlens = cu.view,
               .bounds = bounds.view,
               .cache = call.args.cache,
               .mask = call.args.mask});
    const auto* got = static_cast<const int32_t*>(call.args.mask.bounds.data);
    const auto [page, slot] = call.place(1, 8);
    const int64_t where = in_pages ? call.bounds.at({page, slot, 0, 1}) : call.bounds.at({1, 0, 8, 1});
    EXPECT_EQ(got[where], 1005);
  }
}

TEST(AppendKv, Float8IsDividedByItsScaleAndSaturates) {
  CachedShape shape{.keys = {2}, .rows = {2}, .cache_dtype = DataType::kFloat8E4M3};
  shape.has_scales = true;
  const CachedCase c(shape, 4);
  LaidOutCall call(c, {.page_size = 16});
  NewRows rows(2, 2, 24);  // head 1: 100 and 101, by a scale of 0.75 and of 1
  rows.k.set(0, 1e6);
  const Storage cu = int32s({0, 2});
  append_kv({.k = rows.k.view, .v = rows.v.view, .cu_seqlens = cu.view, .cache = call.args.cache});
  const auto [page, slot] = call.place(0, 0);
  const auto* k = static_cast<const uint8_t*>(call.args.cache.k.data);
  const TensorView& t = call.args.cache.k;
  EXPECT_EQ(float8_e4m3_to_float(k[page * t.stride[0] + slot * t.stride[1]]), 448.0f);
  EXPECT_EQ(float8_e4m3_to_float(k[page * t.stride[0] + slot * t.stride[1] + t.stride[2]]), 128.0f);  // 133.3
}

TEST(AppendKv, Refusals) {
  const CachedCase c({}, 5);
  LaidOutCall call(c, {});
  NewRows rows(4, 2, 24), few_heads(4, 1, 24);
  const Storage cu = int32s({0, 1, 2, 3, 4});
  AppendArgs args{.k = rows.k.view, .v = rows.v.view, .cu_seqlens = cu.view, .cache = call.args.cache};
  AppendArgs wrong = args;
  wrong.k = few_heads.k.view;
  expect_invalid({"k is float32 [4, 1, 24]", "float32 [4, 2, 24]", "cache.k's heads"}, [&] { append_kv(wrong); });
  wrong = args;
  wrong.cu_seqlens = {};
  expect_invalid({"k is float32 [4, 2, 24]", "cu_seqlens or slots"}, [&] { append_kv(wrong); });
  wrong = args;
  wrong.cache.seqlens = {};
  expect_invalid({"seqlens is absent"}, [&] { append_kv(wrong); });
  wrong = args;
  wrong.k.device = {Device::Kind::kCuda, 0};
  expect_invalid({"cu_seqlens", "different devices", "CUDA device 0"}, [&] { append_kv(wrong); });
  wrong = args;
  wrong.bounds = cu.view;
  expect_invalid({"bounds is int32 [5]", "mask has none"}, [&] { append_kv(wrong); });
}

TEST(AppendKv, WithoutADevice) {
  if (has_cuda()) GTEST_SKIP() << "skipped: there is a CUDA device";
  const CachedCase c({}, 6);
  LaidOutCall call(c, {});
  NewRows rows(4, 2, 24);
  const Storage slots = int32s({0, 1, 2, 3});
  AppendArgs args{.k = rows.k.view, .v = rows.v.view, .slots = slots.view, .cache = call.args.cache};
  for (TensorView* t : {&args.k, &args.v, &args.slots, &args.cache.k, &args.cache.v})
    t->device = {Device::Kind::kCuda, 0};
  expect_error(ErrorCode::kNoDevice, {"CUDA"}, [&] { append_kv(args); });
}

}  // namespace
}  // namespace flashmask::test
