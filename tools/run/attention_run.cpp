// SPDX-License-Identifier: Apache-2.0
#include "run/attention_run.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "cli/progress.h"
#include "numerics/device_copies.h"

namespace flashmask::run {
namespace {

Tensor tensor(DataType dtype, int64_t batch, const Packed& packed, int64_t heads, const AttentionShape& shape) {
  return Tensor::attention(dtype, numerics::Layout::kBshd, batch, packed.seqlen, heads, shape.head_dim);
}

Inputs make_inputs(const RunOptions& options, const Packed& packed, int64_t batch) {
  const auto make = [&](int64_t heads) { return tensor(options.dtype, batch, packed, heads, options.shape); };
  return {make(options.shape.heads), make(options.shape.kv_heads), make(options.shape.kv_heads),
          make(options.shape.heads)};
}

}  // namespace

Workbench::Workbench(const RunOptions& options, const Packed& packed, const Projections& projections, int64_t batch)
    : options_(options),
      packed_(packed),
      projections_(projections),
      batch_(batch),
      inputs_(make_inputs(options, packed, batch)) {
  library_options_.threads = options.threads;
  library_options_.backend = options.backend;
  library_options_.deterministic = true;
}

Outputs Workbench::make_outputs() const {
  const auto make = [&](int64_t heads) { return tensor(options_.dtype, batch_, packed_, heads, options_.shape); };
  return {make(options_.shape.heads),
          Tensor::lse(DataType::kFloat32, numerics::Layout::kBshd, batch_, options_.shape.heads, packed_.seqlen),
          make(options_.shape.heads), make(options_.shape.kv_heads), make(options_.shape.kv_heads)};
}

void Workbench::load(int64_t first, int64_t count) {
  count_ = count;
  projections_.fill(packed_, first, count, options_.threads, inputs_.q, inputs_.k, inputs_.v);
  fill_gradient(options_.seed, first, count, options_.threads, inputs_.dout);
}

template <typename F>
double Workbench::seconds_of(F&& call) const {
  if (on_device()) {
    call();  // the first one loads its kernels
    numerics::wait_for_device();
  }
  const auto start = std::chrono::steady_clock::now();
  call();
  if (on_device()) numerics::wait_for_device();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

Seconds Workbench::run(const Mask& mask, Outputs& outputs) {
  Seconds seconds;
  AttentionInputs masks;
  std::optional<Plan> plan;
  std::optional<numerics::DeviceMask> device_mask;
  std::optional<numerics::DevicePlan> device_plan;
  if (on_device()) {
    masks.mask = device_mask.emplace(mask).mask();
    device_plan.emplace(*masks.mask);
    seconds.plan = seconds_of([&] { device_plan->build(*masks.mask); });
    masks.plan = device_plan->view();
  } else {
    masks.mask = mask;
    seconds.plan = seconds_of([&] { plan.emplace(mask); });
    masks.plan = plan->view();
  }
  return seconds += run(masks, outputs);
}

Seconds Workbench::run_dense(std::span<const uint8_t> visible, Outputs& outputs) {
  AttentionInputs masks;
  TensorView& dense = masks.dense_mask;
  dense = TensorView::contiguous(visible.data(), DataType::kBool, {count_, 1, packed_.seqlen, packed_.seqlen});
  std::optional<numerics::DeviceMemory> copy;
  if (on_device()) {
    dense.data = copy.emplace(std::as_bytes(visible)).bytes().data();
    dense.device = numerics::kDevice;
  }
  return run(masks, outputs);
}

Seconds Workbench::run(const AttentionInputs& masks, Outputs& outputs) {
  for (Tensor* result : {&outputs.out, &outputs.lse, &outputs.dq, &outputs.dk, &outputs.dv}) result->poison();
  if (on_device()) return run_on_device(masks, outputs);
  const auto view = [&](const Tensor& tensor) { return tensor.view(count_); };
  return run_calls(masks, {view(inputs_.q), view(inputs_.k), view(inputs_.v), view(inputs_.dout), view(outputs.out),
                           view(outputs.lse), view(outputs.dq), view(outputs.dk), view(outputs.dv)});
}

Seconds Workbench::run_on_device(const AttentionInputs& masks, Outputs& outputs) {
  using numerics::DeviceTensor;
  const DeviceTensor q(inputs_.q), k(inputs_.k), v(inputs_.v), dout(inputs_.dout);
  const DeviceTensor out(outputs.out), lse(outputs.lse), dq(outputs.dq), dk(outputs.dk), dv(outputs.dv);
  const auto view = [&](const DeviceTensor& tensor) { return tensor.view(count_); };
  const Seconds seconds =
      run_calls(masks, {view(q), view(k), view(v), view(dout), view(out), view(lse), view(dq), view(dk), view(dv)});
  out.copy_to(outputs.out);
  lse.copy_to(outputs.lse);
  dq.copy_to(outputs.dq);
  dk.copy_to(outputs.dk);
  dv.copy_to(outputs.dv);
  return seconds;
}

Seconds Workbench::run_calls(AttentionInputs call, const Views& views) {
  call.q = views.q;
  call.k = views.k;
  call.v = views.v;
  const ForwardArgs forward_args{call, views.out, views.lse};
  const BackwardArgs backward_args{call, views.out, views.lse, views.dout, {}, views.dq, views.dk, views.dv};
  if (explanation_.backend.empty()) explanation_ = explain(forward_args, library_options_);
  const std::size_t bytes =
      std::max(forward_workspace(forward_args, library_options_), backward_workspace(backward_args, library_options_));
  std::optional<numerics::DeviceMemory> device_memory;
  if (on_device()) {
    device_memory.emplace(bytes);
  } else if (workspace_.size() < bytes) {
    workspace_.resize(bytes);
  }
  const std::span<std::byte> workspace = device_memory ? device_memory->bytes() : workspace_;

  const auto report = [&](int64_t parts) {
    if (progress) progress(parts * count_);
  };
  Seconds seconds;
  seconds.forward = seconds_of([&] { forward(forward_args, workspace, library_options_); });
  report(kForwardWork);
  seconds.backward = seconds_of([&] { backward(backward_args, workspace, library_options_); });
  report(kBackwardWork);
  return seconds;
}

MaskedFigures run_masked(const RunOptions& options, const Packed& packed, const Projections& projections) {
  MaskedFigures figures;
  figures.sequences =
      options.limit_sequences > 0 ? std::min(options.limit_sequences, packed.sequences) : packed.sequences;
  figures.batch_size = batch_size_of(options, figures.sequences);
  const Mask all = packed.mask(0, figures.sequences);
  figures.statistics = statistics(all);
  figures.mask_bytes = all.memory_bytes();
  figures.plan_bytes = PlanLayout(packed.seqlen, packed.seqlen, figures.sequences, 1).bytes;
  figures.dense_mask_bytes = figures.sequences * packed.seqlen * packed.seqlen;

  Workbench bench(options, packed, projections, figures.batch_size);
  Outputs outputs = bench.make_outputs();
  SampleCheck check(packed, figures.sequences, options.shape, options.dtype, options.seed, options.threads);
  cli::Progress progress("attention", figures.sequences * Workbench::kWorkPerSequence, false);
  bench.progress = [&](int64_t parts) { progress.advance(parts); };
  for (int64_t first = 0; first < figures.sequences; first += figures.batch_size) {
    const int64_t count = std::min(figures.batch_size, figures.sequences - first);
    const Mask mask = packed.mask(first, first + count);
    bench.load(first, count);
    figures.seconds += bench.run(mask, outputs);
    check.check(first, count, mask, bench.inputs(), outputs);
  }
  figures.backend = bench.explanation().backend;
  figures.configuration = bench.explanation().configuration;
  figures.check = check.figures();
  return figures;
}

}  // namespace flashmask::run
