// SPDX-License-Identifier: Apache-2.0
#pragma once

// The backward, by the library, by the oracle and by kernels of other policies.

#include <vector>

#include "backends/cuda/host/launch_chain.h"
#include "backends/cuda/sm90/backward/row_params.h"
#include "backends/cuda/sm90/common/tensor_map.h"
#include "common/arithmetic.h"
#include "common/random.h"
#include "flashmask/attention.h"
#include "gpu/device_vector.h"
#include "gpu/kernel_cases.h"
#include "gpu/policies/calls.h"
#include "gpu/policies/kernels.h"

namespace flashmask::test {

/// dq, dk and dv in float64.
struct Gradients {
  std::vector<double> dq, dk, dv;

  /// Turns dq of the q scaled by kFactors into dq of the unscaled q.
  void chain() {
    for (std::size_t n = 0; n < dq.size(); ++n) dq[n] *= kFactors[n / kDim % kHeads];
  }
};

inline void launch_on_rows(const void* entry, int64_t blocks, int threads, sm90::bwd::RowParams& params) {
  void* arguments[] = {&params};
  cuda::LaunchChain(nullptr).launch("launch of a test's kernel", entry, blocks, threads, 0, arguments);
}

inline sm90::bwd::Rows rows_of(const TensorView& t) { return {t.data, t.stride[0], t.stride[1], t.stride[2]}; }

/// The backward of a Q that is scaled by kFactors: by the library, by the oracle, and by the kernels of other policies.
class Backward {
 public:
  explicit Backward(Attention& a) : a_(a), scaled_q_(a.q.scaled()), random_(2), dout_(random_, kSeqlenQ, kHeads) {
    a.run(scaled_q_, mask_.mask, out_, lse_);
    device_dout_.bytes.copy_from(dout_.numbers.bits);
  }

  Gradients library() {
    const DeviceTensor q(scaled_q_), k(a_.k), v(a_.v);
    DeviceTensor dq(kSeqlenQ, kHeads), dk(kSeqlenK, kHeadsKv), dv(kSeqlenK, kHeadsKv);
    BackwardArgs args;
    args.q = q.view, args.k = k.view, args.v = v.view, args.mask = mask_.mask;
    args.out = out_.view, args.lse = lse_.view, args.dout = device_dout_.view;
    args.dq = dq.view, args.dk = dk.view, args.dv = dv.view;
    const Options options{.softmax_scale = kScale, .backend = "cuda"};
    DeviceBytes workspace(backward_workspace(args, options));
    backward(args, {workspace.data(), workspace.size()}, options);
    check(cudaDeviceSynchronize());
    Gradients gradients{dq.values(), dk.values(), dv.values()};
    gradients.chain();
    return gradients;
  }

  Gradients oracle() {
    const auto of = [](std::vector<double>& values, int64_t seqlen, int64_t heads) {
      values.resize(static_cast<std::size_t>(kBatch * seqlen * heads * kDim));
      return TensorView::contiguous(values.data(), DataType::kFloat64, {kBatch, seqlen, heads, kDim});
    };
    Gradients gradients;
    std::vector<double> out, lse(kBatch * kHeads * kSeqlenQ);
    ForwardArgs fwd;
    fwd.q = scaled_q_.values(), fwd.k = a_.k.values(), fwd.v = a_.v.values(), fwd.mask = Mask(all_keys());
    fwd.out = of(out, kSeqlenQ, kHeads);
    fwd.lse = TensorView::contiguous(lse.data(), DataType::kFloat64, {kBatch, kHeads, kSeqlenQ});
    const Options options{.softmax_scale = kScale, .backend = "reference"};
    forward(fwd, {}, options);
    BackwardArgs args;
    static_cast<AttentionInputs&>(args) = fwd;
    args.out = fwd.out, args.lse = fwd.lse, args.dout = dout_.values();
    args.dq = of(gradients.dq, kSeqlenQ, kHeads);
    args.dk = of(gradients.dk, kSeqlenK, kHeadsKv);
    args.dv = of(gradients.dv, kSeqlenK, kHeadsKv);
    backward(args, {}, options);
    gradients.chain();
    return gradients;
  }

  Gradients head_factor() {
    const DeviceVector<float> factors(std::vector<float>(std::begin(kFactors), std::end(kFactors)));
    HeadFactorBackwardParams params{};
    params.factors = factors.data();
    return run(backward_kernels().head_factor, params);
  }

 private:
  static constexpr int64_t kKeyTiles = ceil_div(kSeqlenK, 128);

  /// Runs the kernel on the unscaled q.
  template <typename Params>
  Gradients run(const BackwardKernel& kernel, Params& params) {
    const BackwardKernels kernels = backward_kernels();
    const int64_t row_tiles = ceil_div(kSeqlenQ, kernel.rows), tiles = kBatch * kHeads * row_tiles;
    const auto rows_of_tiles = static_cast<std::size_t>(tiles * kernel.rows);
    const DeviceTensor q(a_.q), k(a_.k), v(a_.v);
    const DeviceTensor dq(kSeqlenQ, kHeads), dk(kSeqlenK, kHeadsKv), dv(kSeqlenK, kHeadsKv);
    const DeviceVector<float> sums(std::vector<float>(rows_of_tiles * kDim, NAN));
    const DeviceVector<uint32_t> biases(std::vector<uint32_t>(rows_of_tiles * 4, ~0u));
    const DeviceVector<uint32_t> progress(std::vector<uint32_t>(static_cast<std::size_t>(tiles), ~0u)), next({~0u});
    sm90::bwd::RowParams rows = row_params(row_tiles);
    rows.biases = reinterpret_cast<sm90::bwd::RowBias*>(biases.data());
    rows.dq_sums = {.out = rows_of(dq.view), .sums = sums.data(), .progress = progress.data(), .fixed_point = false};
    rows.next = next.data();
    set(params, rows);
    params.q = sm90::tensor_map(q.view, kernel.rows, 1);
    params.dout = sm90::tensor_map(device_dout_.view, kernel.rows, 1);
    params.dq = sm90::tensor_map(dq.view, 16, 1);
    params.k = sm90::tensor_map(k.view, kernel.keys, 1);
    params.v = sm90::tensor_map(v.view, kernel.keys, 1);
    params.keys.maps.dk = sm90::tensor_map(dk.view, 16, 1);
    params.keys.maps.dv = sm90::tensor_map(dv.view, 16, 1);
    launch_on_rows(kernel.preprocess, tiles, kernels.row_threads, rows);
    launch(kernel, kCtas, &params);
    launch_on_rows(kernels.convert_dq, tiles, kernels.row_threads, rows);
    check(cudaDeviceSynchronize());
    return {dq.values(), dk.values(), dv.values()};
  }

  sm90::bwd::RowParams row_params(int64_t row_tiles) const {
    const PlanLayout& layout = mask_.plan.layout();
    sm90::bwd::RowParams rows{};
    rows.out = rows_of(out_.view);
    rows.dout = rows_of(device_dout_.view);
    rows.lse = {lse_.view.data, lse_.view.stride[0], lse_.view.stride[2], lse_.view.stride[1]};
    rows.plan = {.key_live = mask_.at<uint32_t>(layout.key_live),
                 .key_full = mask_.at<uint32_t>(layout.key_full),
                 .row_live = mask_.at<uint32_t>(layout.row_live),
                 .key_order = mask_.at<int32_t>(layout.key_order),
                 .words_per_key = static_cast<int32_t>(2 * layout.words_per_key),
                 .words_per_row = static_cast<int32_t>(2 * layout.words_per_row),
                 .row_granules = static_cast<int32_t>(layout.row_granules),
                 .mask_heads = 1,
                 .sharing = DeviceMaskAndPlan::everywhere()};
    rows.seqlen_q = kSeqlenQ;
    rows.row_tiles = static_cast<uint32_t>(row_tiles);
    rows.key_blocks = kKeyTiles;
    rows.head_dim_v = kDim;
    rows.dq_columns = {kDim, 64};
    rows.heads = kHeads;
    rows.scale = rows.score_scale = static_cast<float>(kScale);
    rows.folds_delta = true;  // no weights are dropped
    return rows;
  }

  void set(sm90::bwd::BackwardParams& p, const sm90::bwd::RowParams& rows) const {
    p.biases = rows.biases;
    p.dq_sums = rows.dq_sums;
    p.seqlen_q = kSeqlenQ;
    p.seqlen_k = kSeqlenK;
    p.row_tiles = static_cast<int32_t>(rows.row_tiles);
    p.heads_q = kHeads;
    p.head_groups = kHeadsKv;
    p.query_heads_per_group = kHeads / kHeadsKv;
    p.splits = 1;
    p.scale = rows.scale;
    p.scale_log2 = static_cast<float>(kScale * kLog2E);
    p.plan = rows.plan;
    p.mask = mask_.columns();
    p.schedule = {.work_tiles = kBatch * kHeadsKv * kKeyTiles,
                  .heads = kBatch * kHeadsKv,
                  .heads_per_l2_group = kHeadsKv,
                  .tiles = kKeyTiles,
                  .next = rows.next};
  }

  Attention& a_;
  Tensor scaled_q_;
  Random random_;
  Tensor dout_;
  DeviceMaskAndPlan mask_{all_keys()};
  DeviceTensor out_{kSeqlenQ, kHeads}, device_dout_{kSeqlenQ, kHeads};
  DeviceLse lse_;
};

}  // namespace flashmask::test
