// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <functional>

#include "cache/cached_call.h"
#include "support/expect_error.h"

namespace flashmask::test {
namespace {

class CachedRefusals : public testing::Test {
 protected:
  CachedRefusals() : c({.keys = {70, 5}, .rows = {3, 9}, .vectors = 1, .tail = 4}, 1), call(c, {}), right(call.args) {}

  /// Expects the call with a change to be refused, and repairs it.
  void refused(std::initializer_list<std::string> parts, const std::function<void(CachedForwardArgs&)>& change) {
    change(call.args);
    expect_invalid(parts, [&] { call.run(); });
    call.args = right;
  }
  static void set_shape(TensorView& t, int d, int64_t n) { t.shape[static_cast<std::size_t>(d)] = n; }

  CachedCase c;
  LaidOutCall call;
  CachedForwardArgs right;
};

TEST_F(CachedRefusals, Rows) {
  refused({"q is float32 [14, 4]", "must have 3 dimensions", "cu_seqlens_q"}, [](auto& a) { a.q.rank = 2; });
  refused({"q is float32 [14, 4, 24]", "must have 4 dimensions"}, [](auto& a) { a.cu_seqlens_q = {}; });
  refused({"q is int32", "accepted dtypes"}, [](auto& a) { a.q.dtype = DataType::kInt32; });
  refused({"cu_seqlens_q is float32 [3]", "int32 [batch + 1]"},
          [](auto& a) { a.cu_seqlens_q.dtype = DataType::kFloat32; });
  refused({"q has 3 heads and k 2"}, [](auto& a) { set_shape(a.q, 1, 3); });
  refused({"out is float32 [13", "rows, heads_q, head_dim_v"}, [](auto& a) { set_shape(a.out, 0, 13); });
  refused({"lse is float32 [4, 13]", "heads_q, rows"}, [](auto& a) { set_shape(a.lse, 1, 13); });
  refused({"out is an output and has stride 0", "must not overlap"}, [](auto& a) { a.out.stride[0] = 0; });
}

TEST_F(CachedRefusals, Cache) {
  refused({"cache.k is float32", "must have 4 dimensions"}, [](auto& a) { a.cache.k.rank = 3; });
  refused({"cache.k is bfloat16", "must be float32 as the rows are", "float8_e4m3"},
          [](auto& a) { a.cache.k.dtype = DataType::kBFloat16; });
  refused({"cache.v is float32", "k's pages"}, [](auto& a) { set_shape(a.cache.v, 0, 3); });
  refused({"cache.k", "last dimension", "contiguous"}, [](auto& a) { a.cache.k.stride[3] = 2; });
  refused({"page_table is int32 [3", "int32 [2, max_pages]"}, [](auto& a) { set_shape(a.cache.page_table, 0, 3); });
  refused({"page_indices is absent"}, [](auto& a) { a.cache.page_indptr = a.cache.seqlens; });
  refused({"page_table and page_indptr are both given"},
          [](auto& a) { a.cache.page_indptr = a.cache.page_indices = a.cache.seqlens; });
  refused({"without page_table its first dimension must be the batch, 2"}, [](auto& a) { a.cache.page_table = {}; });
  refused({"seqlens is int32 [1]", "int32 [2]"}, [](auto& a) { set_shape(a.cache.seqlens, 0, 1); });
  refused({"k_scale is int32 [2]", "only a float8_e4m3 cache"}, [](auto& a) { a.cache.k_scale = a.cache.seqlens; });
  refused({"room for", "2^31 - 1"}, [](auto& a) {
    set_shape(a.cache.page_table, 1, int64_t{1} << 31);
    a.cache.page_table.stride[1] = 0;
  });
}

TEST_F(CachedRefusals, Mask) {
  refused({"bounds is int32", "beside the pages"}, [](auto& a) { set_shape(a.mask.bounds, 1, 3); });
  refused({"bounds is int32", "1 or 2, columns, 1 or 2 (causal)"}, [](auto& a) {
    a.mask.key_layout = KeyLayout::kSequences;
    set_shape(a.mask.bounds, 1, 3);
  });
  refused({"bounds is int32", "2 or 4 (not causal)"}, [](auto& a) { a.mask.causal = false; });
  refused({"tail is int32 [2, 129, 1]", "at most 128"}, [](auto& a) { set_shape(a.mask.tail, 1, 129); });
  refused({"tail_lens is int32 [2]", "absent without tail"}, [](auto& a) {
    a.mask.tail = {};
    a.mask.tail_lens = a.cache.seqlens;
  });
  refused({"tail_depth is int32 [2]", "int32 [2, 4], the tail's"},
          [](auto& a) { a.mask.tail_depth = a.cache.seqlens; });
  refused({"k_pos is int32", "q_pos absent"}, [](auto& a) { a.mask.k_pos = a.cache.seqlens; });
  refused({"q_pos is given beside a tail"}, [](auto& a) { a.mask.q_pos = a.cache.seqlens; });
  refused({"window"}, [](auto& a) { a.mask.window_left = -2; });
  refused({"block_mask is int32 [2]", "bool or uint8 [1 or 2, 1 or 2, row blocks, key blocks]"},
          [](auto& a) { a.mask.block_mask = a.cache.seqlens; });
  refused({"block_mask is uint8 [3, 1, 1, 1]"}, [](auto& a) {
    static uint8_t never_read[3];
    a.mask.block_mask = TensorView::contiguous(never_read, DataType::kUInt8, {3, 1, 1, 1});
  });
  refused({"split_size is 100", "multiple of 128"}, [](auto& a) { a.split_size = 100; });
}

TEST_F(CachedRefusals, Options) {
  call.options.features.dropout.p = 0.5;
  expect_error(ErrorCode::kUnsupported, {"dropout_p is 0.5"}, [&] { call.run(); });
  call.options.features = {};
  call.options.features.partial_out = true;
  expect_error(ErrorCode::kUnsupported, {"partial_out", "merge_attention"}, [&] { call.run(); });
  call.options.features = {.split_size = 128};
  expect_error(ErrorCode::kUnsupported, {"the options' split_size is 128", "its own arguments"}, [&] { call.run(); });
  call.options.features = {};
  call.options.backend = "cuda";
  EXPECT_THROW(call.run(), Error);
  call.options.backend = "auto";
  const std::size_t bytes = cached_forward_workspace(call.args, call.options);
  std::vector<std::byte> workspace(bytes - 1);
  expect_invalid({"workspace has", "needs"}, [&] { cached_forward(call.args, workspace, call.options); });
}

TEST_F(CachedRefusals, ValidateNamesRequestAndValue) {
  validate_cached(call.args);
  const auto found = [&](Storage& s, int64_t at, int32_t value, std::initializer_list<std::string> parts) {
    auto& x = reinterpret_cast<int32_t*>(s.bytes.data())[at];
    const int32_t before = x;
    x = value;
    expect_invalid(parts, [&] { validate_cached(call.args); });
    x = before;
  };
  found(call.seqlens, 1, -1, {"seqlens[1] is -1", "between 0 and"});
  found(call.seqlens, 0, 1 << 30, {"seqlens[0] is 1073741824"});
  found(call.table, 1, 1000, {"page_table has page 1000", "keys from 16 of request 0"});
  found(call.cu_seqlens, 1, 50, {"cu_seqlens_q[1] is 50"});
  call.args.mask.tail_lens = call.tail_lens.view;
  found(call.tail_lens, 0, 5, {"tail_lens[0] is 5", "between 0 and 4"});
}

TEST_F(CachedRefusals, ExplainsItself) {
  const CachedExplanation e = explain_cached(call.args, call.options);
  EXPECT_EQ(e.backend, "cpu");
  EXPECT_NE(e.pages.find("16 keys"), std::string::npos);
  EXPECT_NE(to_json(e).find("\"splits\": \"1024 keys each"), std::string::npos);
  int64_t keys = 0;
  for (int64_t b = 0; b < c.batch(); ++b) {
    for (int64_t j = 0; j < c.keys(b); ++j) {
      for (int64_t hk = 0; hk < 2; ++hk) {
        bool seen = false;
        for (int64_t r = std::max<int64_t>(c.keys(b) - c.rows(b), 0); r < c.keys(b); ++r) seen |= c.sees(b, r, j, hk);
        keys += seen;
      }
    }
  }
  EXPECT_EQ(e.bytes_read, keys * 4 * 48);
}

}  // namespace
}  // namespace flashmask::test
