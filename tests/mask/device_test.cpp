// SPDX-License-Identifier: Apache-2.0
// Masks whose contents are on a device. There is none here: the pointers lead nowhere, so that reading them ends the
// test.
#include <gtest/gtest.h>

#include "flashmask/builders.h"
#include "flashmask/draw.h"
#include "flashmask/inspect.h"
#include "flashmask/mask.h"
#include "flashmask/plan.h"
#include "flashmask/tiles.h"
#include "support/expect_error.h"

namespace flashmask::test {
namespace {

constexpr Device kDevice{Device::Kind::kCuda, 3};
constexpr uintptr_t kIndices = 0x1000, kBlocks = 0x9000;

TensorView on_device(uintptr_t address, DataType dtype, std::initializer_list<int64_t> shape) {
  TensorView view = TensorView::contiguous(reinterpret_cast<const void*>(address), dtype, shape);
  view.device = kDevice;
  return view;
}

const int32_t* element(int64_t n) { return reinterpret_cast<const int32_t*>(kIndices) + n; }

Mask device_mask() {
  return from_startend_row_indices(on_device(kIndices, DataType::kInt32, {2, 3, 300, 4}), false, 200);
}
TensorView device_blocks() { return on_device(kBlocks, DataType::kBool, {2, 3, 2, 3}); }

TEST(DeviceMask, BorrowsTheIndices) {
  const Mask mask = device_mask();
  EXPECT_EQ(mask.device(), kDevice);
  EXPECT_EQ(mask.batch(), 2);
  EXPECT_EQ(mask.heads(), 3);
  EXPECT_EQ(mask.num_intervals(), 2);
  EXPECT_EQ(mask.memory_bytes(), 0);
  EXPECT_EQ(mask.q_offset(), 100);
  const MaskView& view = mask.view();
  EXPECT_EQ(view.device, kDevice);
  EXPECT_EQ(view.bounds_stride, 4);
  EXPECT_EQ(view.content_hash, 0u);
  EXPECT_EQ(view.lts, element(0));
  EXPECT_EQ(view.lte, element(1));
  EXPECT_EQ(view.uts, element(2));
  EXPECT_EQ(view.ute, element(3));
}

TEST(DeviceMask, EveryFormPutsTheVectorsWhereTheyBelong) {
  const auto view = [](bool causal, int64_t n) {
    return from_startend_row_indices(on_device(kIndices, DataType::kInt32, {1, 1, 8, n}), causal, 8).view();
  };
  const MaskView lts = view(true, 1), both = view(true, 2), outer = view(false, 2);
  EXPECT_EQ(lts.lts, element(0));
  EXPECT_FALSE(lts.lte || lts.uts || lts.ute);
  EXPECT_EQ(lts.bounds_stride, 1);
  EXPECT_EQ(lts.diagonal_hi, 0);
  EXPECT_EQ(both.lte, element(1));
  EXPECT_FALSE(both.uts || both.ute);
  EXPECT_EQ(outer.lts, element(0));
  EXPECT_EQ(outer.ute, element(1));
  EXPECT_FALSE(outer.lte || outer.uts);
  EXPECT_EQ(outer.diagonal_hi, INT32_MAX);
}

TEST(DeviceMask, KeepsTheVectorsUnderAnotherBandOffsetAndBlockMask) {
  const Mask mask = device_mask().with_band(Band::window(5, 0)).with_q_offset(7).with_block_mask(device_blocks());
  EXPECT_EQ(mask.view().diagonal_lo, 2);
  EXPECT_EQ(mask.view().diagonal_hi, 7);
  EXPECT_EQ(mask.view().lts, element(0));
  EXPECT_EQ(mask.view().bounds_stride, 4);
  EXPECT_EQ(mask.view().block_mask, reinterpret_cast<const uint8_t*>(kBlocks));
  EXPECT_EQ(mask.view().block_batch, 2);
  EXPECT_EQ(mask.view().content_hash, 0u);
  EXPECT_TRUE(mask.has_block_mask());
  EXPECT_FALSE(mask.with_block_mask({}).has_block_mask());
  const Mask only_blocks = masks::causal(200, 300).with_block_mask(device_blocks());
  EXPECT_EQ(only_blocks.device(), kDevice);
  EXPECT_EQ(only_blocks.view().content_hash, 0u);
  EXPECT_EQ(only_blocks.with_block_mask({}).view().content_hash, masks::causal(200, 300).view().content_hash);
}

TEST(DeviceMask, WithoutContentsIsOnTheCpu) {
  EXPECT_EQ(masks::causal(8, 8).device(), Device{});
  const Mask empty = from_startend_row_indices(on_device(0, DataType::kInt32, {2, 1, 0, 2}), true, 8);
  EXPECT_EQ(empty.device(), Device{});
  EXPECT_EQ(empty.batch(), 1);
}

TEST(DeviceMask, HostFunctionsNameTheDevice) {
  for (const Mask& mask : {device_mask(), masks::full(200, 300).with_block_mask(device_blocks())}) {
    const auto refused = [](const char* reader, auto&& f) {
      expect_invalid({reader, "CUDA device 3", "host memory"}, f);
    };
    refused("Mask::lts", [&] { mask.lts(); });
    refused("Mask::lte", [&] { mask.lte(); });
    refused("Mask::uts", [&] { mask.uts(); });
    refused("Mask::ute", [&] { mask.ute(); });
    refused("Mask::block_mask", [&] { mask.block_mask(); });
    refused("Mask::visible", [&] { mask.visible(0, 0, 0, 0); });
    refused("Mask::validate", [&] { mask.validate(); });
    refused("to_dense", [&] { to_dense(mask); });
    refused("classify_tiles", [&] { classify_tiles(mask, 0, 0); });
    refused("conversion or composition", [&] {
      to_startend_row_indices(mask.with_block_mask({}).batch() > 1 ? mask.with_block_mask({}) : device_mask());
    });
    refused("conversion or composition", [&] { intersect(mask, masks::causal(200, 300)); });
    refused("conversion or composition", [&] { concatenate(std::vector{mask}); });
    refused("crop", [&] { crop(mask, 0, 128, 0, 128); });
    refused("", [&] { statistics(mask); });
    refused("", [&] { draw_text(mask, {}); });
    refused("", [&] { draw_svg(mask, {}); });
    expect_invalid({"host memory"}, [&] { Plan plan(mask); });
  }
}

TEST(DeviceMask, WrongIndices) {
  const auto read = [](const TensorView& indices) {
    return [indices] { from_startend_row_indices(indices, false, 8); };
  };
  TensorView strided = on_device(kIndices, DataType::kInt32, {2, 2, 8, 4});
  strided.stride[2] = 8;
  expect_invalid({"CUDA device 3", "stride 8 in dimension 2", "contiguous (stride 4)"}, read(strided));
  TensorView expanded = on_device(kIndices, DataType::kInt32, {2, 2, 8, 4});
  expanded.stride[0] = 0;
  expect_invalid({"stride 0 in dimension 0", "contiguous"}, read(expanded));
  TensorView one = on_device(kIndices, DataType::kInt32, {1, 1, 8, 4});
  one.stride[0] = one.stride[1] = 12345;  // never stepped along
  EXPECT_NO_THROW(read(one)());
  expect_invalid({"address", "4 bytes"}, read(on_device(kIndices + 2, DataType::kInt32, {1, 1, 8, 4})));
  expect_invalid({"startend_row_indices", "null"}, read(on_device(0, DataType::kInt32, {1, 1, 8, 4})));
}

TEST(DeviceMask, WrongBlockMasks) {
  const Mask mask = device_mask();
  expect_invalid({"block_mask is int32", "bool or uint8"},
                 [&] { mask.with_block_mask(on_device(kBlocks, DataType::kInt32, {1, 1, 2, 3})); });
  expect_invalid({"block_mask is bool [1, 1, 3, 3]", "2 and 3"},
                 [&] { mask.with_block_mask(on_device(kBlocks, DataType::kBool, {1, 1, 3, 3})); });
  expect_invalid({"block_mask's batch is 0"},
                 [&] { mask.with_block_mask(on_device(kBlocks, DataType::kBool, {0, 1, 2, 3})); });
  expect_invalid({"block_mask has no data"},
                 [&] { mask.with_block_mask(on_device(0, DataType::kBool, {1, 1, 2, 3})); });
  TensorView strided = device_blocks();
  strided.stride[2] = 4;
  expect_invalid({"block_mask", "contiguous"}, [&] { mask.with_block_mask(strided); });
  TensorView elsewhere = device_blocks();
  elsewhere.device.index = 1;
  expect_invalid({"vectors are on CUDA device 3", "block mask on CUDA device 1"},
                 [&] { mask.with_block_mask(elsewhere); });
  expect_invalid({"vectors are on CUDA device 3", "block mask on the CPU"},
                 [&] { mask.with_block_mask(std::vector<uint8_t>(6, 1)); });
  const Mask host({.seqlen_q = 200, .seqlen_k = 300, .lts = std::vector<int32_t>(300, 7)});
  expect_invalid({"vectors are on the CPU", "block mask on CUDA device 3"},
                 [&] { host.with_block_mask(device_blocks()); });
}

TEST(Mask, BlockMaskFromATensor) {
  const Mask mask = masks::full(200, 300);
  const std::vector<int32_t> keep{1, 0, 5, 0, -1, 0};
  const Mask blocked = mask.with_block_mask(TensorView::contiguous(keep.data(), DataType::kInt32, {1, 1, 2, 3}));
  EXPECT_EQ(std::vector<uint8_t>(blocked.block_mask().begin(), blocked.block_mask().end()),
            (std::vector<uint8_t>{1, 0, 1, 0, 1, 0}));
  EXPECT_EQ(blocked.view().content_hash, mask.with_block_mask({1, 0, 1, 0, 1, 0}).view().content_hash);
  TensorView transposed = TensorView::contiguous(keep.data(), DataType::kInt32, {1, 1, 2, 3});
  transposed.stride = {0, 0, 1, 2};
  const Mask other = mask.with_block_mask(transposed);
  EXPECT_EQ(std::vector<uint8_t>(other.block_mask().begin(), other.block_mask().end()),
            (std::vector<uint8_t>{1, 1, 1, 0, 0, 0}));
}

}  // namespace
}  // namespace flashmask::test
