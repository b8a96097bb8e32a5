// SPDX-License-Identifier: Apache-2.0
// Host allocations of a call on borrowed device tensors: none in the library, from the second call on.

#include "support/allocations.h"

#include <gtest/gtest.h>

#include <vector>

#include "flashmask/c_api.h"
#include "gpu/device_vector.h"
#include "support/c_tensor.h"

namespace flashmask::test {
namespace {

constexpr int64_t kLength = 640, kHeads = 4, kHeadsKv = 2, kDim = 64;

/// A workspace of device memory, made at once for all calls.
struct Workspace {
  static constexpr std::size_t kBytes = std::size_t{64} << 20;
  DeviceVector<uint8_t> memory{std::vector<uint8_t>(kBytes)};
  int asked = 0;

  static void* allocate(void* context, std::size_t bytes) {
    auto* workspace = static_cast<Workspace*>(context);
    ++workspace->asked;
    return bytes <= kBytes ? workspace->memory.data() : nullptr;
  }
};

/// A causal call with vectors and a block mask, in both directions.
struct DeviceCall {
  using Halves = DeviceVector<uint16_t>;
  static std::vector<uint16_t> zeros(int64_t heads) {
    return std::vector<uint16_t>(static_cast<std::size_t>(kLength * heads * kDim));
  }
  Halves q{zeros(kHeads)}, out{zeros(kHeads)}, dout{zeros(kHeads)}, dq{zeros(kHeads)};
  Halves k{zeros(kHeadsKv)}, v{zeros(kHeadsKv)}, dk{zeros(kHeadsKv)}, dv{zeros(kHeadsKv)};
  DeviceVector<float> lse{std::vector<float>(kLength * kHeads)};
  DeviceVector<int32_t> bounds{std::vector<int32_t>(kLength, 500)};
  DeviceVector<uint8_t> blocks{std::vector<uint8_t>(25, 1)};
  Workspace workspace;
  fm_mask mask{};
  fm_options options{};
  fm_forward_args forward{};
  fm_backward_args backward{};

  DeviceCall() {
    mask.struct_size = sizeof(mask);
    mask.flags = FM_CAUSAL;
    mask.seqlen_q = mask.seqlen_k = kLength;
    mask.bounds = tensor(FM_INT32, {1, 1, kLength, 1}, bounds.data());
    mask.block_mask = tensor(FM_BOOL, {1, 1, 5, 5}, blocks.data());
    options.struct_size = sizeof(options);
    options.device = 1;
    options.allocate = Workspace::allocate;
    options.allocate_context = &workspace;
    const auto of = [](const Halves& data, int64_t heads) {
      return tensor(FM_BFLOAT16, {1, kLength, heads, kDim}, data.data());
    };
    forward.struct_size = sizeof(forward);
    backward.struct_size = sizeof(backward);
    forward.q = backward.q = of(q, kHeads);
    forward.k = backward.k = of(k, kHeadsKv);
    forward.v = backward.v = of(v, kHeadsKv);
    forward.out = backward.out = of(out, kHeads);
    forward.lse = backward.lse = tensor(FM_FLOAT32, {1, kHeads, kLength}, lse.data());
    backward.dout = of(dout, kHeads);
    backward.dq = of(dq, kHeads);
    backward.dk = of(dk, kHeadsKv);
    backward.dv = of(dv, kHeadsKv);
    forward.mask = backward.mask = &mask;
  }
  void expect_none(const char* what) {
    EXPECT_EQ(second_call_allocations(
                  [&] { ASSERT_EQ(fm_forward(&forward, nullptr, 0, &options), FM_OK) << fm_last_error(); }),
              0)
        << "forward, " << what;
    EXPECT_EQ(second_call_allocations(
                  [&] { ASSERT_EQ(fm_backward(&backward, nullptr, 0, &options), FM_OK) << fm_last_error(); }),
              0)
        << "backward, " << what;
    EXPECT_EQ(workspace.asked, 4) << what;
    workspace.asked = 0;
    check(cudaDeviceSynchronize());
  }
};

TEST(AllocationsOnDevice, NoneInACall) {
  FLASHMASK_NEEDS_GPU();
  DeviceCall call;
  call.expect_none("a plan made in the call");
  std::size_t bytes = 0;
  ASSERT_EQ(fm_plan_bytes(&call.mask, &bytes), FM_OK);
  const DeviceVector<uint64_t> plan{std::vector<uint64_t>(bytes / 8)};
  EXPECT_EQ(second_call_allocations([&] {
              ASSERT_EQ(fm_plan_build(&call.mask, plan.data(), bytes, &call.options), FM_OK) << fm_last_error();
            }),
            0);
  call.forward.plan = call.backward.plan = plan.data();
  call.forward.plan_bytes = call.backward.plan_bytes = bytes;
  call.expect_none("a plan given");
  call.options.flags = FM_DETERMINISTIC;
  call.expect_none("deterministic");
}

}  // namespace
}  // namespace flashmask::test
