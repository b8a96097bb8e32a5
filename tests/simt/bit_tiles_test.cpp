// SPDX-License-Identifier: Apache-2.0

// Calls under masks of interval lists, whose tiles' elements come from the plan's bits: the same bits as under the
// dense matrix, which the kernels read element by element.

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/element.h"
#include "common/random.h"
#include "flashmask/attention.h"
#include "flashmask/plan.h"
#include "gpu/device_mask.h"
#include "support/expect_error.h"
#include "support/extent.h"
#include "support/independent_rule.h"
#include "support/random_masks.h"

namespace flashmask::test {
namespace {

constexpr Device kDevice{Device::Kind::kCuda, 0};

struct Sizes {
  int64_t batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim;
};

/// A tensor of bfloat16, or of another type.
class Values {
 public:
  explicit Values(std::initializer_list<int64_t> shape, DataType dtype = DataType::kBFloat16) {
    TensorView shaped = TensorView::contiguous(nullptr, dtype, shape);
    bytes_.assign(static_cast<std::size_t>(shaped.num_elements()) * element_size(dtype) + 16, std::byte{0xff});
    view = shaped;
    view.data = bytes_.data();
    view.device = kDevice;
  }
  Values& drawn(Random& random) {
    for (int64_t at = 0; at < view.num_elements(); ++at) store_element(view, at, 2 * random.real() - 1);
    return *this;
  }
  bool operator==(const Values& other) const { return bytes_ == other.bytes_; }

  TensorView view;

 private:
  std::vector<std::byte> bytes_;
};

/// A call's tensors.
struct Attention {
  Values q, k, v, dout, out, lse, dq, dk, dv;

  Attention(const Sizes& s, Random random)
      : q({s.batch, s.seqlen_q, s.heads_q, s.head_dim}),
        k({s.batch, s.seqlen_k, s.heads_kv, s.head_dim}),
        v({s.batch, s.seqlen_k, s.heads_kv, s.head_dim}),
        dout({s.batch, s.seqlen_q, s.heads_q, s.head_dim}),
        out({s.batch, s.seqlen_q, s.heads_q, s.head_dim}),
        lse({s.batch, s.heads_q, s.seqlen_q}, DataType::kFloat32),
        dq({s.batch, s.seqlen_q, s.heads_q, s.head_dim}),
        dk({s.batch, s.seqlen_k, s.heads_kv, s.head_dim}),
        dv({s.batch, s.seqlen_k, s.heads_kv, s.head_dim}) {
    for (Values* input : {&q, &k, &v, &dout}) input->drawn(random);
  }

  void run(const AttentionInputs& given, const Options& options) {
    ForwardArgs forward_args;
    BackwardArgs args;
    static_cast<AttentionInputs&>(forward_args) = given;
    static_cast<AttentionInputs&>(args) = given;
    forward_args.q = args.q = q.view, forward_args.k = args.k = k.view, forward_args.v = args.v = v.view;
    forward_args.out = args.out = out.view, forward_args.lse = args.lse = lse.view;
    args.dout = dout.view, args.dq = dq.view, args.dk = dk.view, args.dv = dv.view;
    std::vector<std::byte> workspace(forward_workspace(forward_args, options), std::byte{0xff});
    forward(forward_args, workspace, options);
    workspace.assign(backward_workspace(args, options), std::byte{0xff});
    backward(args, workspace, options);
  }
};

/// The mask's lists, block mask and positions as tensors of the device, whose memory is the host's.
Mask on_device(const Mask& mask) {
  const MaskView& view = mask.view();
  const auto tensor = [](const auto* data, DataType dtype, std::initializer_list<int64_t> shape) {
    auto* memory = const_cast<std::remove_const_t<std::remove_pointer_t<decltype(data)>>*>(data);
    TensorView of = TensorView::contiguous(memory, dtype, shape);
    of.device = kDevice;
    return of;
  };
  const std::optional<int64_t> q_offset = mask.has_positions() ? std::nullopt : std::optional(mask.q_offset());
  Mask made = from_interval_lists(
      tensor(view.column_ptr, DataType::kInt32, {view.bounds_batch, view.bounds_heads, view.seqlen_k + 1}),
      tensor(view.intervals, DataType::kInt32, {view.listed_intervals, 2}), view.seqlen_q, q_offset);
  made = made.with_band(mask.band());
  if (mask.has_positions())
    made = made.with_positions(tensor(view.q_pos, DataType::kInt32, {view.q_pos_batch, view.seqlen_q}),
                               tensor(view.k_pos, DataType::kInt32, {view.k_pos_batch, view.seqlen_k}));
  if (!view.block_mask) return made;
  const auto blocks = [](int64_t seqlen) { return (seqlen + 127) / 128; };
  return made.with_block_mask(
      tensor(view.block_mask, DataType::kUInt8,
             {view.block_batch, view.block_heads, blocks(view.seqlen_q), blocks(view.seqlen_k)}));
}

/// Runs the mask, by a plan that the call makes or with room for just its tiles, and its dense matrix.
void expect_same_bits(const Sizes& s, const MaskParts& parts, const Options& options, Random random) {
  const Mask host(parts);
  if (!host.has_interval_lists()) return;
  const Mask mask = on_device(host);
  Attention by_lists(s, random), by_matrix(s, random);
  AttentionInputs inputs;
  inputs.mask = mask;
  std::vector<uint64_t> plan;
  if (random.flip()) {
    const auto layout_of = [&](int64_t tiles) {
      return PlanLayout(s.seqlen_q, s.seqlen_k, mask.batch(), mask.heads(), tiles);
    };
    plan.resize(static_cast<std::size_t>(layout_of(0).bytes / 8));
    const int64_t tiles = count_bit_tiles(mask.view(), std::as_writable_bytes(std::span(plan)), kDevice);
    plan.assign(static_cast<std::size_t>(layout_of(tiles).bytes / 8), ~uint64_t{0});
    build_plan(mask.view(), std::as_writable_bytes(std::span(plan)), kDevice);
    inputs.plan = PlanView::on_device(layout_of(tiles), std::as_bytes(std::span(plan)), kDevice);
  }
  by_lists.run(inputs, options);

  const std::vector<uint8_t> dense = dense_by_rule(parts);
  AttentionInputs of_matrix;
  of_matrix.dense_mask = TensorView::contiguous(const_cast<uint8_t*>(dense.data()), DataType::kUInt8,
                                                {host.batch(), host.heads(), s.seqlen_q, s.seqlen_k});
  of_matrix.dense_mask.device = kDevice;
  by_matrix.run(of_matrix, options);
  EXPECT_TRUE(by_lists.out == by_matrix.out);
  EXPECT_TRUE(by_lists.lse == by_matrix.lse);
  EXPECT_TRUE(by_lists.dq == by_matrix.dq);
  EXPECT_TRUE(by_lists.dk == by_matrix.dk);
  EXPECT_TRUE(by_lists.dv == by_matrix.dv);
}

TEST(BitTiles, HaveTheBitsOfTheMatrix) {
  Random random(1);
  for (int64_t n = 0; n < scaled(24); ++n) {
    constexpr int64_t kHeadDims[] = {32, 64, 96, 128, 192, 256};
    const Sizes s{.batch = 2,
                  .seqlen_q = random.integer(1, 330),
                  .seqlen_k = random.integer(1, 330),
                  .heads_q = 4,
                  .heads_kv = 2,
                  .head_dim = kHeadDims[n % 6]};
    MaskParts parts = random_parts(random, ColumnKind::kLists, s.seqlen_q, s.seqlen_k, random.integer(1, 2),
                                   random.flip() ? 4 : random.integer(1, 2));
    if (random.integer(0, 2) == 0) draw_positions(random, random.integer(1, 2), parts);
    if (random.integer(0, 2) == 0) draw_block_mask(random, 1, 2, parts);
    Options options;
    options.deterministic = true;
    SCOPED_TRACE("case " + std::to_string(n) + ": " + std::to_string(s.seqlen_q) + " x " + std::to_string(s.seqlen_k) +
                 ", head dim " + std::to_string(s.head_dim));
    expect_same_bits(s, parts, options, random);
    if (HasFailure()) return;
  }
}

TEST(BitTiles, TakeNoMoreMemoryThanAllowed) {
  const Mask host({.seqlen_q = 200, .seqlen_k = 1, .column_ptr = {0, 3}, .intervals = {1, 2, 3, 4, 5, 6}});
  const Mask mask = on_device(host);
  constexpr int64_t kLists = 2 * 4 + 3 * 8;
  std::vector<uint64_t> scratch(1024);
  const auto count = [&](int64_t max_mask_bytes) {
    return count_bit_tiles(mask.view(), std::as_writable_bytes(std::span(scratch)), kDevice, nullptr, max_mask_bytes);
  };
  const auto bytes = [](int64_t tiles) { return kLists + PlanLayout(200, 1, 1, 1, tiles).bytes; };
  EXPECT_EQ(count(bytes(1)), 1);
  expect_error(ErrorCode::kUnsupported, {"interval lists of 32 bytes", "1024 of them bits", "max_mask_bytes allows"},
               [&] { count(bytes(1) - 1); });
  // A call that makes its own plan has room for four.
  Attention call({.batch = 1, .seqlen_q = 200, .seqlen_k = 1, .heads_q = 1, .heads_kv = 1, .head_dim = 64}, Random(1));
  AttentionInputs inputs;
  inputs.mask = mask;
  Options options;
  options.max_mask_bytes = bytes(4);
  call.run(inputs, options);
  options.max_mask_bytes = bytes(4) - 1;
  expect_error(ErrorCode::kUnsupported, {"4096 of them bits", "max_mask_bytes allows"},
               [&] { call.run(inputs, options); });
}

TEST(BitTiles, TakeAQuarterOfTheDevicesMemoryAtMost) {
  constexpr int64_t kLong = 1 << 20;  // its bits take 128 GiB; the device has 80
  std::vector<std::byte> somewhere(1024);
  const auto shaped = [&](std::initializer_list<int64_t> shape, DataType dtype = DataType::kBFloat16) {
    TensorView view = TensorView::contiguous(somewhere.data(), dtype, shape);
    view.device = kDevice;
    return view;
  };
  ForwardArgs args;
  args.q = args.k = args.v = args.out = shaped({1, kLong, 1, 64});
  args.lse = shaped({1, 1, kLong}, DataType::kFloat32);
  args.mask = from_interval_lists(shaped({1, 1, kLong + 1}, DataType::kInt32), shaped({3, 2}, DataType::kInt32), kLong);
  expect_error(ErrorCode::kUnsupported,
               {std::to_string(int64_t{128} << 30) + " of them bits",
                "max_mask_bytes allows " + std::to_string(int64_t{20} << 30) + " (a quarter of the device's memory)"},
               [&] { forward_workspace(args); });
  Options options;
  options.max_mask_bytes = int64_t{130} << 30;
  EXPECT_GT(forward_workspace(args, options), std::size_t{128} << 30);
}

}  // namespace
}  // namespace flashmask::test
