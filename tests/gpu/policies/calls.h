// SPDX-License-Identifier: Apache-2.0
#pragma once

// Inputs of the policies' tests: tensors and masks; and the forward, by the library and by kernels of other policies.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "backends/cuda/host/launch_chain.h"
#include "backends/cuda/sm90/common/tensor_map.h"
#include "common/arithmetic.h"
#include "common/random.h"
#include "flashmask/attention.h"
#include "gpu/device_vector.h"
#include "gpu/kernel_cases.h"
#include "gpu/policies/kernels.h"
#include "mask/view.h"

namespace flashmask::test {

/// Two query tiles and seven key tiles of 128, the last ones short; two query heads share a key head.
inline constexpr int64_t kBatch = 2, kHeads = 4, kHeadsKv = 2, kSeqlenQ = 200, kSeqlenK = 845, kDim = 64;
/// Fewer than there are work tiles, so that every CTA takes several.
inline constexpr int64_t kCtas = 5;
inline constexpr double kScale = 0.25, kLog2E = 1.4426950408889634;
inline constexpr DataType kType = DataType::kBFloat16;
/// Powers of two: scaling Q by them rounds nothing.
inline constexpr float kFactors[kHeads] = {0.5f, 0.25f, 2.f, 1.f};

/// A tensor [batch, seqlen, heads, dim] on the host, as bits and as values.
struct Tensor {
  int64_t seqlen, heads;
  Numbers numbers;

  Tensor(Random& random, int64_t rows, int64_t of_heads)
      : seqlen(rows), heads(of_heads), numbers(random, kType, kBatch * rows * of_heads * kDim) {}

  /// Times kFactors of each head.
  Tensor scaled() const {
    Tensor result = *this;
    result.numbers = {};
    for (std::size_t n = 0; n < numbers.values.size(); ++n)
      result.numbers.add(kType, numbers.values[n] * kFactors[n / kDim % static_cast<std::size_t>(heads)]);
    return result;
  }
  TensorView values() {
    return TensorView::contiguous(numbers.values.data(), DataType::kFloat64, {kBatch, seqlen, heads, kDim});
  }
};

/// Memory of the device for a tensor, which begins as NaN.
struct DeviceTensor {
  DeviceBytes bytes;
  TensorView view;

  DeviceTensor(int64_t seqlen, int64_t heads)
      : bytes(static_cast<std::size_t>(kBatch * seqlen * heads * kDim) * 2),
        view(on_device(bytes, kType, {kBatch, seqlen, heads, kDim})) {
    bytes.fill(0xff);
  }
  explicit DeviceTensor(const Tensor& host) : DeviceTensor(host.seqlen, host.heads) {
    bytes.copy_from(host.numbers.bits);
  }

  std::vector<uint16_t> bits() const {
    std::vector<uint16_t> bits(bytes.size() / 2);
    std::memcpy(bits.data(), bytes.read().data(), bytes.size());
    return bits;
  }
  std::vector<double> values() const {
    std::vector<double> values;
    for (const uint16_t bits : this->bits()) values.push_back(from_bits(kType, bits));
    return values;
  }
};

/// lse [batch, heads, seqlen_q], which begins as NaN.
struct DeviceLse {
  DeviceVector<float> values{std::vector<float>(kBatch * kHeads * kSeqlenQ, NAN)};
  TensorView view = device_view();

 private:
  TensorView device_view() const {
    TensorView all = TensorView::contiguous(values.data(), DataType::kFloat32, {kBatch, kHeads, kSeqlenQ});
    all.device = kDevice;
    return all;
  }
};

/// Keys that alone are seen from row kAlone on.
inline constexpr int64_t kAlone = 150;
inline bool seen_alone(int64_t j) { return j * 7 % 11 < 4; }

/// A causal band, in which every third stretch of 70 keys is hidden from some row on, and from row kAlone on all keys
/// but those seen alone. `keys`: which keys exist; the others are hidden from every row.
template <typename Keys>
MaskParts make_parts(Keys keys) {
  MaskParts parts{.seqlen_q = kSeqlenQ, .seqlen_k = kSeqlenK, .band = Band::causal()};
  for (int64_t j = 0; j < kSeqlenK; ++j) {
    const int64_t end = std::min(j / 70 % 3 == 1 ? 50 + j % 100 : kSeqlenQ, seen_alone(j) ? kSeqlenQ : kAlone);
    parts.lts.push_back(static_cast<int32_t>(keys(j) ? end : 0));
  }
  return parts;
}
/// All rows see keys of all tiles: so many that the schedule for long rows runs.
inline MaskParts all_keys() {
  return make_parts([](int64_t) { return true; });
}
/// Four tiles' keys: the schedule for short rows.
inline MaskParts last_keys() {
  return make_parts([](int64_t j) { return j >= 400; });
}

/// A mask and its plan on the device.
struct DeviceMaskAndPlan {
  DeviceBytes vectors, buffer{0};
  Mask mask;
  PlanView plan;

  explicit DeviceMaskAndPlan(const MaskParts& parts)
      : vectors(interleave(parts)), mask(make_mask(parts, vectors)), plan(make_plan(mask, buffer, true)) {}

  template <typename T>
  const T* at(int64_t offset) const {
    return reinterpret_cast<const T*>(plan.data() + offset);
  }
  cuda::MaskColumns columns() const { return {flashmask::columns(mask.view(), 0, 0), {everywhere(), 0, 0}}; }
  /// One mask for all batch entries and heads.
  static cuda::Sharing everywhere() { return {kBatch, kHeads}; }
};

inline void launch(const Kernel& kernel, int64_t blocks, void* params) {
  check(cudaFuncSetAttribute(kernel.entry, cudaFuncAttributeMaxDynamicSharedMemorySize, kernel.shared_bytes));
  void* arguments[] = {params};
  cuda::LaunchChain(nullptr).launch("launch of a test's kernel", kernel.entry, blocks, kernel.threads,
                                    kernel.shared_bytes, arguments);
}

/// Inputs, and what the library's call on them gives.
struct Attention {
  Random random{1};
  Tensor q{random, kSeqlenQ, kHeads}, k{random, kSeqlenK, kHeadsKv}, v{random, kSeqlenK, kHeadsKv};

  /// The library's kernel, with this Q.
  void run(const Tensor& with_q, const Mask& mask, DeviceTensor& out, DeviceLse& lse) const {
    const DeviceTensor device_q(with_q), device_k(k), device_v(v);
    ForwardArgs args;
    args.q = device_q.view, args.k = device_k.view, args.v = device_v.view;
    args.out = out.view, args.lse = lse.view, args.mask = mask;
    const Options options{.softmax_scale = kScale, .backend = "cuda"};
    DeviceBytes workspace(forward_workspace(args, options));
    forward(args, {workspace.data(), workspace.size()}, options);
    check(cudaDeviceSynchronize());
  }
};

/// Inputs of a forward kernel, and its results.
struct ForwardRun {
  DeviceTensor q, k, v, out{kSeqlenQ, kHeads};
  DeviceLse lse;
  DeviceVector<uint32_t> counter{{0}};

  explicit ForwardRun(const Attention& a) : q(a.q), k(a.k), v(a.v) {}

  int64_t row_tiles(const Kernel& kernel) const { return ceil_div(kSeqlenQ, kernel.rows); }

  void set(sm90::ForwardParams& p, const Kernel& kernel, const DeviceMaskAndPlan& mask) const {
    const PlanLayout& layout = mask.plan.layout();
    p.q = sm90::tensor_map(q.view, kernel.rows, 1);
    p.k = sm90::tensor_map(k.view, kernel.keys, 1);
    p.v = sm90::tensor_map(v.view, kernel.keys, 1);
    p.out = sm90::tensor_map(out.view, 16, 1);
    p.lse = lse.values.data();
    p.lse_batch_stride = lse.view.stride[0];
    p.lse_head_stride = lse.view.stride[1];
    p.lse_row_stride = lse.view.stride[2];
    p.seqlen_q = kSeqlenQ;
    p.seqlen_k = kSeqlenK;
    p.key_blocks = static_cast<int32_t>(ceil_div(kSeqlenK, kernel.keys));
    p.heads_q = kHeads;
    p.query_heads_per_kv_head = kHeads / kHeadsKv;
    p.scale_log2 = static_cast<float>(kScale * kLog2E);
    p.score_of_bit = 1 / p.scale_log2;
    p.plan = {.row_live = mask.at<uint32_t>(layout.row_live),
              .row_full = mask.at<uint32_t>(layout.row_full),
              .row_tile_order = mask.at<int32_t>(layout.row_tile_order_128),
              .words_per_row = static_cast<int32_t>(2 * layout.words_per_row),
              .row_granules = static_cast<int32_t>(layout.row_granules),
              .mask_heads = 1,
              .sharing = DeviceMaskAndPlan::everywhere()};
    p.element_mask = sm90::ElementMask::kColumns;
    p.mask = mask.columns();
    p.schedule = {.work_tiles = static_cast<uint32_t>(kBatch * kHeads * row_tiles(kernel)),
                  .heads = kBatch * kHeads,
                  .heads_per_l2_group = kHeads,
                  .tiles = static_cast<uint32_t>(row_tiles(kernel)),
                  .next = counter.data()};
  }
};

}  // namespace flashmask::test
