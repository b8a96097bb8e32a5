// SPDX-License-Identifier: Apache-2.0
// Refusals of mask.h: every message names the argument, its value and the accepted ones.
#include <gtest/gtest.h>

#include <string>

#include "flashmask/mask.h"
#include "support/expect_error.h"

namespace flashmask::test {
namespace {

constexpr int64_t kHuge = int64_t{1} << 40;

void expect_refused(MaskParts parts, std::initializer_list<std::string> message) {
  expect_invalid(message, [&] { Mask mask(std::move(parts)); });
}

TEST(MaskErrors, Lengths) {
  expect_refused({.seqlen_q = -1, .seqlen_k = 4}, {"seqlen_q is -1", "between 0 and 2147483647"});
  expect_refused({.seqlen_q = 4, .seqlen_k = -2}, {"seqlen_k is -2", "between 0 and 2147483647"});
  expect_refused({.seqlen_q = kMaxSeqlen + 1, .seqlen_k = 4}, {"seqlen_q is 2147483648", "between 0 and 2147483647"});
  expect_refused({.seqlen_q = 4, .seqlen_k = INT64_MAX},
                 {"seqlen_k is 9223372036854775807", "between 0 and 2147483647"});
}

TEST(MaskErrors, BatchAndHeads) {
  expect_refused({.seqlen_q = 4, .seqlen_k = 4, .batch = 0}, {"batch is 0", "at least 1"});
  expect_refused({.seqlen_q = 4, .seqlen_k = 4, .heads = -3}, {"heads is -3", "at least 1"});
  expect_refused({.seqlen_q = 4, .seqlen_k = 4, .block_batch = 0, .block_mask = {1}},
                 {"block_batch is 0", "at least 1"});
  expect_refused({.seqlen_q = 4, .seqlen_k = 4, .block_heads = -1, .block_mask = {1}},
                 {"block_heads is -1", "at least 1"});
}

TEST(MaskErrors, VectorSizes) {
  const std::string shape = "[batch, heads, seqlen_k]";
  expect_refused({.seqlen_q = 4, .seqlen_k = 4, .lts = {1, 2, 3}}, {"lts has 3 elements", shape, "needs 4"});
  expect_refused({.seqlen_q = 4, .seqlen_k = 2, .heads = 3, .lte = {1, 2}}, {"lte has 2 elements", shape, "needs 6"});
  expect_refused({.seqlen_q = 4, .seqlen_k = 1, .batch = 2, .uts = {1, 2, 3}},
                 {"uts has 3 elements", shape, "needs 2"});
  expect_refused({.seqlen_q = 4, .seqlen_k = 1, .ute = {1, 2}}, {"ute has 2 elements", shape, "needs 1"});
  expect_refused({.seqlen_q = 4, .seqlen_k = 0, .lts = {1}}, {"lts has 1 elements", "needs 0"});
  expect_refused({.seqlen_q = 4, .seqlen_k = kMaxSeqlen, .batch = kHuge, .heads = kHuge, .lts = {1}},
                 {"lts has 1 elements", "more than 2^63"});
  expect_refused({.seqlen_q = 4, .seqlen_k = 1, .batch = kHuge, .lts = {1}},
                 {"lts has 1 elements", "needs 1099511627776"});
}

TEST(MaskErrors, PositionsOfRowsAndKeysComeTogether) {
  expect_refused({.seqlen_q = 2, .seqlen_k = 3, .q_pos = {5, 6}}, {"k_pos is absent and q_pos is given"});
  expect_refused({.seqlen_q = 2, .seqlen_k = 3, .k_pos = {4, 5, 6}}, {"q_pos is absent and k_pos is given"});
  expect_refused({.seqlen_q = 2, .seqlen_k = 3, .q_pos = {5}, .k_pos = {4, 5, 6}},
                 {"q_pos has 1 elements", "[position_batch, seqlen_q] needs 2"});
  expect_refused({.seqlen_q = 2, .seqlen_k = 1, .position_batch = 2, .q_pos = {5, 6, 7, 8}, .k_pos = {4}},
                 {"k_pos has 1 elements", "[position_batch, seqlen_k] needs 2"});
  expect_refused({.seqlen_q = 1, .seqlen_k = 1, .position_batch = 0, .q_pos = {1}, .k_pos = {1}},
                 {"position_batch is 0", "at least 1"});
  expect_refused({.seqlen_q = 1,
                  .seqlen_k = 1,
                  .batch = 2,
                  .lts = {1, 1},
                  .position_batch = 3,
                  .q_pos = {1, 2, 3},
                  .k_pos = {1, 2, 3}},
                 {"vectors have 2 batch entries", "q_pos 3", "or one of them 1"});
}

TEST(MaskErrors, PositionsTakeThePlaceOfAnOffset) {
  const MaskParts parts{.seqlen_q = 1, .seqlen_k = 1, .q_offset = 0, .q_pos = {1}, .k_pos = {1}};
  expect_refused(parts, {"q_offset is 0", "must be absent with q_pos and k_pos"});
  const Mask mask({.seqlen_q = 1, .seqlen_k = 1, .q_pos = {1}, .k_pos = {1}});
  expect_invalid({"q_offset is 3", "the mask has positions"}, [&] { mask.with_q_offset(3); });
}

TEST(MaskErrors, EdgesThatPositionsCannotReach) {
  const Mask mask({.seqlen_q = 1, .seqlen_k = 1, .q_pos = {1}, .k_pos = {1}});
  expect_invalid({"lower edge is 2147483648", "at most 2147483647"},
                 [&] { mask.with_band({.lo = int64_t{1} << 31, .hi = std::nullopt}); });
  expect_invalid({"upper edge is -2147483648", "at least -2147483647"},
                 [&] { mask.with_band({.lo = std::nullopt, .hi = -(int64_t{1} << 31)}); });
}

TEST(MaskErrors, PositionTensors) {
  const std::vector<int32_t> numbers(12);
  const Mask mask({.seqlen_q = 2, .seqlen_k = 3});
  const auto of = [&](DataType dtype, std::initializer_list<int64_t> shape) {
    return TensorView::contiguous(numbers.data(), dtype, shape);
  };
  const TensorView q = of(DataType::kInt32, {1, 2}), k = of(DataType::kInt32, {1, 3});
  expect_invalid({"q_pos is int64 [1, 2]", "int32 [batch or 1, seqlen_q], with 2 positions"},
                 [&] { mask.with_positions(of(DataType::kInt64, {1, 2}), k); });
  expect_invalid({"k_pos is int32 [3]", "int32 [batch or 1, seqlen_k], with 3 positions"},
                 [&] { mask.with_positions(q, of(DataType::kInt32, {3})); });
  expect_invalid({"k_pos is int32 [1, 4]", "with 3 positions"},
                 [&] { mask.with_positions(q, of(DataType::kInt32, {1, 4})); });
  expect_invalid({"k_pos is absent and q_pos is given"}, [&] { mask.with_positions(q, TensorView{}); });
  expect_invalid({"q_pos has 2 batch entries", "k_pos 3"},
                 [&] { mask.with_positions(of(DataType::kInt32, {2, 2}), of(DataType::kInt32, {3, 3})); });
  TensorView elsewhere = k;
  elsewhere.device = {Device::Kind::kCuda, 0};
  expect_invalid({"q_pos is on", "k_pos on CUDA device 0"}, [&] { mask.with_positions(q, elsewhere); });
}

TEST(MaskErrors, BlockMaskSize) {
  const std::string shape = "[block_batch, block_heads, ceil(seqlen_q / 128), ceil(seqlen_k / 128)]";
  expect_refused({.seqlen_q = 129, .seqlen_k = 128, .block_mask = {1}},
                 {"block_mask has 1 elements", shape, "needs 2"});
  expect_refused({.seqlen_q = 1, .seqlen_k = 1, .block_heads = 2, .block_mask = {1}},
                 {"block_mask has 1 elements", shape, "needs 2"});
  expect_refused({.seqlen_q = 0, .seqlen_k = 1, .block_mask = {1}}, {"block_mask has 1 elements", "needs 0"});
  const Mask mask({.seqlen_q = 200, .seqlen_k = 200});
  expect_invalid({"block_mask has 3 elements", "needs 4"}, [&] { mask.with_block_mask({1, 1, 1}); });
  expect_invalid({"block_mask has 4 elements", "needs 8"}, [&] { mask.with_block_mask({1, 1, 1, 1}, 2, 1); });
  expect_invalid({"block_batch is 0"}, [&] { mask.with_block_mask({1, 1, 1, 1}, 0, 1); });
  expect_invalid({"block_heads is -1"}, [&] { mask.with_block_mask({1, 1, 1, 1}, 1, -1); });
}

TEST(MaskErrors, VectorsAndBlockMaskMustBroadcast) {
  MaskParts parts{.seqlen_q = 1, .seqlen_k = 1, .heads = 2, .lts = {1, 1}, .block_heads = 3, .block_mask = {1, 1, 1}};
  expect_refused(parts, {"2 heads", "block mask 3"});
  parts = {.seqlen_q = 1, .seqlen_k = 1, .batch = 3, .lts = {1, 1, 1}, .block_batch = 2, .block_mask = {1, 1}};
  expect_refused(parts, {"3 batch entries", "block mask 2"});
  // Heads may be grouped, 4 over 2; vectors serve one batch entry or all.
  parts = {.seqlen_q = 1, .seqlen_k = 1, .batch = 4, .lts = {1, 1, 1, 1}, .block_batch = 2, .block_mask = {1, 1}};
  expect_refused(parts, {"4 batch entries", "block mask 2"});
  const Mask mask({.seqlen_q = 1, .seqlen_k = 1, .heads = 2, .lts = {1, 1}});
  expect_invalid({"2 heads", "block mask 5"}, [&] { mask.with_block_mask({1, 1, 1, 1, 1}, 1, 5); });
  const Mask batched({.seqlen_q = 1, .seqlen_k = 1, .batch = 2, .lts = {1, 1}});
  expect_invalid({"2 batch entries", "block mask 3"}, [&] { batched.with_block_mask({1, 1, 1}, 3, 1); });
}

TEST(MaskErrors, Offset) {
  const Mask mask({.seqlen_q = 4, .seqlen_k = 4});
  expect_refused({.seqlen_q = 4, .seqlen_k = 4, .q_offset = -kHuge - 1}, {"q_offset is -1099511627777", "2^40"});
  expect_invalid({"q_offset is 9223372036854775807", "2^40"}, [&] { mask.with_q_offset(INT64_MAX); });
  expect_invalid({"q_offset is -9223372036854775808", "2^40"}, [&] { mask.with_q_offset(INT64_MIN); });
}

/// A tensor of this shape over no more than one element.
TensorView over_one_element(DataType dtype, std::initializer_list<int64_t> shape) {
  static int32_t element = 0;
  return TensorView::contiguous(&element, dtype, shape);
}

TEST(MaskErrors, TensorsAreRefusedBeforeTheyAreRead) {
  const Mask mask({.seqlen_q = 300, .seqlen_k = 300});
  for (const int64_t rows : {int64_t{300'000'000}, int64_t{1} << 31}) {
    expect_invalid({"block_mask is bool [1, 1, " + std::to_string(rows) + ", 1]", "must be 3 and 3"},
                   [&] { mask.with_block_mask(over_one_element(DataType::kBool, {1, 1, rows, 1})); });
  }
  const Mask of_two({.seqlen_q = 300, .seqlen_k = 300, .batch = 2, .lts = std::vector<int32_t>(600, 300)});
  expect_invalid({"2 batch entries", "block mask 3"},
                 [&] { of_two.with_block_mask(over_one_element(DataType::kBool, {3, 1, 3, 3})); });
  const auto far = over_one_element(DataType::kInt32, {1, 1, 300'000'000, 1});
  for (const int64_t seqlen_q : {int64_t{-1}, kMaxSeqlen + 1, int64_t{INT64_MIN}, int64_t{INT64_MAX}})
    expect_invalid({"seqlen_q is " + std::to_string(seqlen_q)},
                   [&] { from_startend_row_indices(far, true, seqlen_q); });
  expect_invalid({"q_offset is 9223372036854775807"}, [&] { from_startend_row_indices(far, true, 5, INT64_MAX); });
}

TEST(MaskErrors, SizesAndStridesThatOverflow) {
  const Mask mask({.seqlen_q = 1, .seqlen_k = 1});
  auto blocks = over_one_element(DataType::kUInt8, {1, 1, 1, 1});
  blocks.shape[0] = blocks.shape[1] = kHuge;
  expect_invalid({"block_mask is uint8 [1099511627776, 1099511627776, 1, 1]", "2^63"},
                 [&] { mask.with_block_mask(blocks); });
  auto indices = over_one_element(DataType::kInt32, {2, 1, 3, 1});
  indices.stride[0] = INT64_MAX;
  expect_invalid({"startend_row_indices is int32 [2, 1, 3, 1]", "strides", "2^63"},
                 [&] { from_startend_row_indices(indices, true, 4); });
  auto visible = over_one_element(DataType::kBool, {3, 2});
  visible.stride[0] = INT64_MIN;
  expect_invalid({"visible is bool [3, 2]", "strides", "2^63"}, [&] { from_dense(visible); });
  indices = over_one_element(DataType::kInt32, {1, 1, 3, 1});
  indices.data = static_cast<char*>(indices.data) + 2;
  expect_invalid({"the address of startend_row_indices is not a multiple of 4 bytes"},
                 [&] { from_startend_row_indices(indices, true, 4); });
}

TEST(MaskErrors, Window) {
  expect_invalid({"window left is -2", "-1 (unbounded) or at least 0"}, [] { Band::window(-2, 0); });
  expect_invalid({"window right is -5", "-1 (unbounded) or at least 0"}, [] { Band::window(0, -5); });
}

TEST(MaskErrors, VisibleOutsideOfTheMask) {
  const Mask mask({.seqlen_q = 2, .seqlen_k = 3, .batch = 2, .lts = {1, 1, 1, 1, 1, 1}});
  EXPECT_NO_THROW(mask.visible(1, 0, 1, 2));
  const std::string shape = "[2, 1, 2, 3]";
  expect_invalid({"batch 2", shape}, [&] { mask.visible(2, 0, 0, 0); });
  expect_invalid({"batch -1", shape}, [&] { mask.visible(-1, 0, 0, 0); });
  expect_invalid({"head 1", shape}, [&] { mask.visible(0, 1, 0, 0); });
  expect_invalid({"head -1", shape}, [&] { mask.visible(0, -1, 0, 0); });
  expect_invalid({"row 2", shape}, [&] { mask.visible(0, 0, 2, 0); });
  expect_invalid({"row -1", shape}, [&] { mask.visible(0, 0, -1, 0); });
  expect_invalid({"key 3", shape}, [&] { mask.visible(0, 0, 0, 3); });
  expect_invalid({"key -1", shape}, [&] { mask.visible(0, 0, 0, -1); });
}

}  // namespace
}  // namespace flashmask::test
