// SPDX-License-Identifier: Apache-2.0
// Tensor views: what they say about themselves.
#include "flashmask/tensor.h"

#include <gtest/gtest.h>

namespace flashmask::test {
namespace {

TEST(Tensor, Contiguous) {
  float data[24] = {};
  const TensorView t = TensorView::contiguous(data, DataType::kFloat32, {2, 3, 4});
  EXPECT_TRUE(t.defined());
  EXPECT_EQ(t.data, data);
  EXPECT_EQ(t.rank, 3);
  EXPECT_EQ(t.shape[0], 2);
  EXPECT_EQ(t.shape[2], 4);
  EXPECT_EQ(t.stride[0], 12);
  EXPECT_EQ(t.stride[1], 4);
  EXPECT_EQ(t.stride[2], 1);
  EXPECT_EQ(t.num_elements(), 24);
  EXPECT_EQ(t.device, Device{});
}

TEST(Tensor, AZeroDimensionIsPresent) {
  const TensorView t = TensorView::contiguous(nullptr, DataType::kFloat16, {2, 0, 4});
  EXPECT_TRUE(t.defined());
  EXPECT_EQ(t.num_elements(), 0);
  EXPECT_EQ(t.stride[0], 4) << "strides as if the length were one, never 0";
  EXPECT_FALSE(TensorView().defined());
}

TEST(Tensor, Describe) {
  EXPECT_EQ(describe(TensorView()), "absent");
  EXPECT_EQ(describe(TensorView::contiguous(nullptr, DataType::kFloat32, {2, 128, 8, 64})), "float32 [2, 128, 8, 64]");
  EXPECT_EQ(describe(TensorView::contiguous(nullptr, DataType::kBool, {})), "bool []");
  TensorView broken = TensorView::contiguous(nullptr, DataType::kInt32, {1, 2, 3, 4, 5});
  broken.rank = 100;
  EXPECT_EQ(describe(broken), "int32 [1, 2, 3, 4, 5]") << "a rank that is too large is not followed";
}

TEST(Tensor, ElementTypes) {
  const auto is = [](DataType dtype, std::size_t size, std::string_view text) {
    EXPECT_EQ(element_size(dtype), size) << text;
    EXPECT_EQ(name(dtype), text);
  };
  is(DataType::kNone, 0, "none");
  is(DataType::kFloat32, 4, "float32");
  is(DataType::kFloat64, 8, "float64");
  is(DataType::kBFloat16, 2, "bfloat16");
  is(DataType::kFloat16, 2, "float16");
  is(DataType::kInt32, 4, "int32");
  is(DataType::kBool, 1, "bool");
  is(DataType::kUInt8, 1, "uint8");
  is(static_cast<DataType>(99), 0, "unknown");
}

}  // namespace
}  // namespace flashmask::test
