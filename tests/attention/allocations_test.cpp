// SPDX-License-Identifier: Apache-2.0

// Allocations of a call before its kernels run: none from the second call on. tests/gpu/allocations_test.cpp counts
// them for calls on a GPU.

#include "support/allocations.h"

#include <gtest/gtest.h>

#include <vector>

#include "flashmask/c_api.h"
#include "flashmask/mask.h"
#include "mask/mask_tensors.h"
#include "support/c_tensor.h"

namespace flashmask::test {
namespace {

/// A call of 300 rows and keys with vectors and a block mask.
struct CallOfC {
  static constexpr int64_t kLength = 300;
  std::vector<float> q = std::vector<float>(kLength * 8), k = q, v = q, out = q, dout = q, dq = q, dk = q, dv = q;
  std::vector<float> lse = std::vector<float>(kLength);
  std::vector<int32_t> bounds = std::vector<int32_t>(kLength, 200);
  std::vector<uint8_t> blocks = std::vector<uint8_t>(9, 1);
  fm_mask mask{};
  fm_backward_args backward{};
  fm_forward_args forward{};

  CallOfC() {
    mask.struct_size = sizeof(mask);
    mask.flags = FM_CAUSAL;
    mask.seqlen_q = mask.seqlen_k = kLength;
    mask.bounds = tensor(FM_INT32, {1, 1, kLength, 1}, bounds.data());
    mask.block_mask = tensor(FM_BOOL, {1, 1, 3, 3}, blocks.data());
    const auto of = [](std::vector<float>& data) { return tensor(FM_FLOAT32, {1, kLength, 1, 8}, data.data()); };
    backward.struct_size = sizeof(backward);
    forward.struct_size = sizeof(forward);
    forward.q = backward.q = of(q);
    forward.k = backward.k = of(k);
    forward.v = backward.v = of(v);
    forward.out = backward.out = of(out);
    forward.lse = backward.lse = tensor(FM_FLOAT32, {1, 1, kLength}, lse.data());
    backward.dout = of(dout);
    backward.dq = of(dq);
    backward.dk = of(dk);
    backward.dv = of(dv);
    forward.mask = backward.mask = &mask;
  }
};

TEST(Allocations, AreCounted) {
  EXPECT_GT(second_call_allocations([] { Mask({.seqlen_q = 4, .seqlen_k = 4}); }), 0);
}

TEST(Allocations, NoneToCheckAndConfigureACall) {
  const CallOfC call;
  std::size_t bytes = 0;
  EXPECT_EQ(second_call_allocations([&] { ASSERT_EQ(fm_plan_bytes(&call.mask, &bytes), FM_OK) << fm_last_error(); }),
            0);
  EXPECT_EQ(second_call_allocations(
                [&] { ASSERT_EQ(fm_forward_workspace(&call.forward, nullptr, &bytes), FM_OK) << fm_last_error(); }),
            0);
  EXPECT_EQ(second_call_allocations(
                [&] { ASSERT_EQ(fm_backward_workspace(&call.backward, nullptr, &bytes), FM_OK) << fm_last_error(); }),
            0);
}

TEST(Allocations, NoneInACallThatHasItsPlan) {
  CallOfC call;
  std::size_t plan_bytes = 0, forward_bytes = 0, backward_bytes = 0;
  ASSERT_EQ(fm_plan_bytes(&call.mask, &plan_bytes), FM_OK);
  std::vector<uint64_t> plan(plan_bytes / 8);
  ASSERT_EQ(fm_plan_build(&call.mask, plan.data(), plan_bytes, nullptr), FM_OK);
  call.forward.plan = call.backward.plan = plan.data();
  call.forward.plan_bytes = call.backward.plan_bytes = plan_bytes;
  ASSERT_EQ(fm_forward_workspace(&call.forward, nullptr, &forward_bytes), FM_OK);
  ASSERT_EQ(fm_backward_workspace(&call.backward, nullptr, &backward_bytes), FM_OK);
  std::vector<std::byte> workspace(std::max(forward_bytes, backward_bytes));
  EXPECT_EQ(second_call_allocations(
                [&] { ASSERT_EQ(fm_forward(&call.forward, workspace.data(), workspace.size(), nullptr), FM_OK); }),
            0);
  EXPECT_EQ(second_call_allocations(
                [&] { ASSERT_EQ(fm_backward(&call.backward, workspace.data(), workspace.size(), nullptr), FM_OK); }),
            0);
}

TEST(Allocations, NoneToBorrowAMask) {
  alignas(4) static const std::byte kMemory[16] = {};
  const Device device{Device::Kind::kCuda, 3};
  TensorView indices = TensorView::contiguous(const_cast<std::byte*>(kMemory), DataType::kInt32, {2, 1, 300, 4});
  TensorView blocks = TensorView::contiguous(const_cast<std::byte*>(kMemory), DataType::kBool, {2, 4, 3, 3});
  indices.device = blocks.device = device;
  const MaskTensors tensors{
      .seqlen_q = 300, .seqlen_k = 300, .band = Band::window(7, 9), .indices = indices, .block_mask = blocks};
  MaskView view;
  EXPECT_EQ(second_call_allocations([&] { view = view_of(tensors); }), 0);

  const Mask mask =
      from_startend_row_indices(indices, false, 300).with_band(Band::window(7, 9)).with_block_mask(blocks);
  const MaskView& same = mask.view();
  EXPECT_EQ(view.lts, same.lts);
  EXPECT_EQ(view.lte, same.lte);
  EXPECT_EQ(view.uts, same.uts);
  EXPECT_EQ(view.ute, same.ute);
  EXPECT_EQ(view.ute, reinterpret_cast<const int32_t*>(kMemory) + 3);
  EXPECT_EQ(view.block_mask, same.block_mask);
  EXPECT_EQ(view.bounds_stride, same.bounds_stride);
  EXPECT_EQ(view.batch(), same.batch());
  EXPECT_EQ(view.heads(), same.heads());
  EXPECT_EQ(view.diagonal_lo, same.diagonal_lo);
  EXPECT_EQ(view.diagonal_hi, same.diagonal_hi);
  EXPECT_EQ(view.device, device);
  EXPECT_EQ(view.content_hash, 0u);
  EXPECT_EQ(same.content_hash, 0u);
}

}  // namespace
}  // namespace flashmask::test
