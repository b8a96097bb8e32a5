// SPDX-License-Identifier: Apache-2.0
#include "call/options.h"

#include <algorithm>
#include <string>
#include <vector>

#include "common/message.h"

namespace flashmask {

void check_number(const NumberOption& option, const Features& features) {
  const double value = option.value(features);
  if (value != 0 && !option.accepts(value)) throw_invalid(option.name, " is ", value, "; it must be ", option.accepted);
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
  for (const TensorOption& option : kTensorOptions) {
    if (option.value(features).defined()) asked.emplace_back(option.name);
  }
  for (const FlagOption& option : kFlagOptions) {
    if (option.value(features)) asked.emplace_back(option.name);
  }
  return asked;
}

}  // namespace flashmask
