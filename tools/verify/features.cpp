// SPDX-License-Identifier: Apache-2.0
#include "verify/features.h"

#include <algorithm>

#include "flashmask/attention.h"
#include "flashmask/builders.h"
#include "numerics/device_copies.h"

namespace flashmask::verify {
namespace {

TensorView undefined_memory(DataType dtype, std::initializer_list<int64_t> shape, const Device& device) {
  TensorView view = TensorView::contiguous(nullptr, dtype, shape);
  view.device = device;
  return view;
}

/// A call that every backend takes; it is never run.
ForwardArgs plain_call(const Device& device) {
  ForwardArgs args;
  args.q = args.k = args.v = args.out = undefined_memory(DataType::kBFloat16, {1, 1, 1, 64}, device);
  args.lse = undefined_memory(DataType::kFloat32, {1, 1, 1}, device);
  return args;
}

ForwardArgs call_with_positions(ForwardArgs args, const Device& device) {
  static int32_t position;
  TensorView positions = TensorView::contiguous(&position, DataType::kInt32, {1, 1});
  positions.device = device;
  args.mask = masks::causal(1, 1).with_positions(positions, positions);
  return args;
}

}  // namespace

std::vector<std::string> refused_features(const std::string& backend) {
  const Device device = backend == "cuda" ? numerics::kDevice : Device{};
  const ForwardArgs args = plain_call(device);
  std::vector<std::string> refused;
  const auto ask = [&](const ForwardArgs& of, const Features& asked) {
    const Explanation explanation = explain(of, Options{.features = asked, .backend = backend});
    if (explanation.backend.empty())
      refused.insert(refused.end(), explanation.features.begin(), explanation.features.end());
  };
  ask(args, {.softcap = 30});
  ask(args, {.sink = undefined_memory(DataType::kFloat32, {1}, device)});
  ask(args, {.dropout = {.p = 0.1}});
  ForwardArgs partial = args;
  partial.out.dtype = DataType::kFloat32;
  ask(partial, {.partial_out = true});
  ask(call_with_positions(args, device), {});
  return refused;
}

bool asks_for_any(const CaseFeatures& features, const std::vector<std::string>& names) {
  const auto is_named = [&](const char* name) { return std::find(names.begin(), names.end(), name) != names.end(); };
  return (features.sink != SinkKind::kNone && is_named("sink")) || (features.softcap != 0 && is_named("softcap")) ||
         (features.dropout != 0 && is_named("dropout")) ||
         (features.positions != Positions::kNone && is_named("positions")) ||
         (features.partial && is_named("partial_out"));
}

}  // namespace flashmask::verify
