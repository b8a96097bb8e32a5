// SPDX-License-Identifier: Apache-2.0
#include "call/options.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "call/requirements.h"
#include "common/message.h"
#include "plan/mask_memory.h"

namespace flashmask {

void check_options(const Options& options) {
  if (options.threads < 0) throw_invalid("threads is ", options.threads, "; it must be 0 (the default) or more");
  if (options.max_ctas < 0)
    throw_invalid("max_ctas is ", options.max_ctas, "; it must be 0 (one for each multiprocessor) or more");
  if (const auto& scale = options.softmax_scale; scale && !(*scale >= 0 && std::isfinite(*scale)))
    throw_invalid("softmax_scale is ", *scale, "; it must be finite and at least 0");
  check_max_mask_bytes(options.max_mask_bytes);
  for (const NumberOption& option : kNumberOptions) check_value(option, options.features);
  for (const CountOption& option : kCountOptions) check_value(option, options.features);
}

void read_options(const Options& options, int64_t head_dim, CommonOptions& to) {
  to.softmax_scale = options.softmax_scale.value_or(1 / std::sqrt(static_cast<double>(head_dim)));
  to.features = options.features;
  to.threads = options.threads;
  to.max_ctas = options.max_ctas;
  to.stream = options.stream;
}

void check_tensor_options(const Features& features, int64_t batch, int64_t heads_q, DataType dtype,
                          const Device& device, bool with_data) {
  for (const TensorOption& option : kTensorOptions) {
    const TensorView& tensor = option.value(features);
    if (!tensor.defined()) continue;
    const DataType wanted = option.takes_own_type && tensor.dtype == dtype ? dtype : DataType::kFloat32;
    const Requirement of_heads{
        {heads_q}, option.by_batch ? "heads_q; or batch, heads_q" : "heads_q", wanted, false, false};
    const Requirement of_batch{{batch, heads_q}, "batch, heads_q", wanted, false, false};
    check_tensor(option.name, tensor, option.by_batch && tensor.rank == 2 ? of_batch : of_heads, device, with_data);
  }
}

const NumberOption& option_of(std::string_view name) {
  return *std::ranges::find(kNumberOptions, name,
                            [](const NumberOption& option) { return std::string_view(option.name); });
}

std::vector<std::string> names(const Features& features) {
  std::vector<std::string> asked;
  for (const NumberOption& option : kNumberOptions) {
    if (option.value(features) != 0) asked.emplace_back(option.feature);
  }
  for (const CountOption& option : kCountOptions) {
    if (option.value(features) != 0) asked.emplace_back(option.feature);
  }
  for (const TensorOption& option : kTensorOptions) {
    if (option.value(features).defined()) asked.emplace_back(option.name);
  }
  for (const FlagOption& option : kFlagOptions) {
    if (option.value(features)) asked.emplace_back(option.name);
  }
  return asked;
}

}  // namespace flashmask
