// SPDX-License-Identifier: Apache-2.0
#include "run/attention_run.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "cli/progress.h"

namespace flashmask::run {
namespace {

template <typename F>
double seconds_of(F&& f) {
  const auto start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

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

AttentionInputs Workbench::call_of() const {
  AttentionInputs call;
  call.q = inputs_.q.view(count_);
  call.k = inputs_.k.view(count_);
  call.v = inputs_.v.view(count_);
  return call;
}

Explanation Workbench::explain(const Mask& mask, const Outputs& outputs) const {
  const Plan plan(mask);
  ForwardArgs args{call_of(), outputs.out.view(count_), outputs.lse.view(count_)};
  args.mask = mask;
  args.plan = plan.view();
  return flashmask::explain(args, library_options_);
}

Seconds Workbench::run(const Mask& mask, Outputs& outputs) {
  std::optional<Plan> plan;
  Seconds seconds;
  seconds.plan = seconds_of([&] { plan.emplace(mask); });
  AttentionInputs call = call_of();
  call.mask = mask;
  call.plan = plan->view();
  seconds += run(call, outputs);
  return seconds;
}

Seconds Workbench::run_dense(std::span<const uint8_t> visible, Outputs& outputs) {
  AttentionInputs call = call_of();
  call.dense_mask =
      TensorView::contiguous(visible.data(), DataType::kBool, {count_, 1, packed_.seqlen, packed_.seqlen});
  return run(call, outputs);
}

Seconds Workbench::run(const AttentionInputs& call, Outputs& outputs) {
  for (Tensor* result : {&outputs.out, &outputs.lse, &outputs.dq, &outputs.dk, &outputs.dv}) result->poison();
  const ForwardArgs forward_args{call, outputs.out.view(count_), outputs.lse.view(count_)};
  BackwardArgs backward_args;
  static_cast<AttentionInputs&>(backward_args) = call;
  backward_args.out = forward_args.out;
  backward_args.lse = forward_args.lse;
  backward_args.dout = inputs_.dout.view(count_);
  backward_args.dq = outputs.dq.view(count_);
  backward_args.dk = outputs.dk.view(count_);
  backward_args.dv = outputs.dv.view(count_);
  const std::size_t bytes =
      std::max(forward_workspace(forward_args, library_options_), backward_workspace(backward_args, library_options_));
  if (workspace_.size() < bytes) workspace_.resize(bytes);

  const auto report = [&](int64_t parts) {
    if (progress) progress(parts * count_);
  };
  Seconds seconds;
  seconds.forward = seconds_of([&] { forward(forward_args, workspace_, library_options_); });
  report(kForwardWork);
  seconds.backward = seconds_of([&] { backward(backward_args, workspace_, library_options_); });
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
    if (first == 0) {
      const Explanation explanation = bench.explain(mask, outputs);
      figures.backend = explanation.backend;
      figures.configuration = explanation.configuration;
    }
    figures.seconds += bench.run(mask, outputs);
    check.check(first, count, mask, bench.inputs(), outputs);
  }
  figures.check = check.figures();
  return figures;
}

}  // namespace flashmask::run
