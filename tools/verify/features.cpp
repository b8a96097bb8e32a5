// SPDX-License-Identifier: Apache-2.0
#include "verify/features.h"

#include <algorithm>

#include "flashmask/attention.h"
#include "verify/device_case.h"

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

}  // namespace

std::vector<std::string> refused_features(const std::string& backend) {
  const Device device = backend == "cuda" ? kDevice : Device{};
  const ForwardArgs args = plain_call(device);
  std::vector<std::string> refused;
  for (const Features& asked :
       {Features{.softcap = 30}, Features{.sink = undefined_memory(DataType::kFloat32, {1}, device)},
        Features{.dropout = {.p = 0.1}}}) {
    const Explanation explanation = explain(args, Options{.features = asked, .backend = backend});
    if (explanation.backend.empty())
      refused.insert(refused.end(), explanation.features.begin(), explanation.features.end());
  }
  return refused;
}

bool asks_for_any(const CaseFeatures& features, const std::vector<std::string>& names) {
  const auto is_named = [&](const char* name) { return std::find(names.begin(), names.end(), name) != names.end(); };
  return (features.sink != SinkKind::kNone && is_named("sink")) || (features.softcap != 0 && is_named("softcap")) ||
         (features.dropout != 0 && is_named("dropout"));
}

}  // namespace flashmask::verify
