// SPDX-License-Identifier: Apache-2.0
#pragma once

// Shared by the builders of builders.cpp and model_masks.cpp.

#include <cstdint>
#include <span>
#include <string_view>

#include "common/message.h"
#include "flashmask/builders.h"
#include "mask/families/arguments.h"

namespace flashmask::building {

using build::build_mask;
using build::Parameter;

inline Parameter of(std::string_view name, int64_t number) { return {.name = name, .number = number}; }
inline Parameter of(std::string_view name, std::span<const int64_t> values) {
  return {.name = name,
          .vector = TensorView::contiguous(values.data(), DataType::kInt64, {static_cast<int64_t>(values.size())})};
}
inline Parameter of(const Documents& documents) { return of("cu_seqlens", documents.cu_seqlens()); }

inline void check_not_negative(const char* argument, int64_t value) {
  if (value < 0) throw_invalid(argument, " is ", value, "; it must be at least 0");
}

}  // namespace flashmask::building
