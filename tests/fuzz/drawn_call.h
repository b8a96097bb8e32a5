// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "flashmask/c_api.h"
#include "fuzz/byte_reader.h"
#include "fuzz/c_tensors.h"

namespace flashmask::fuzz {

/// Sizes of structs, buffers and such: the right one, unless it is changed.
enum class Size : uint8_t { kRight, kOneLess, kNone, kCount };

/// A call that every function takes, of which up to seven fields have been changed.
struct Drawn {
  explicit Drawn(ByteReader& bytes);
  Drawn(const Drawn&) = delete;  // `tensors` point into it
  Drawn& operator=(const Drawn&) = delete;

  fm_mask mask{};
  fm_options options{};
  fm_backward_args args{};  ///< for both directions
  fm_tensor visible{};
  std::vector<Argument> tensors;
  int64_t backend = 0;
  bool has_mask = true, with_plan = false, null_options = false, count = false;
  Size plan = Size::kRight, workspace = Size::kRight, text = Size::kRight;
  uint8_t null_struct = 0, plan_header = 0;
  int changes = 0;

  bool readable(const fm_tensor& t) const {
    return std::find_if(tensors.begin(), tensors.end(), [&](const Argument& a) { return a.tensor == &t; })->readable;
  }
};

}  // namespace flashmask::fuzz
