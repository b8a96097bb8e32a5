// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "flashmask/c_api.h"
#include "fuzz/byte_reader.h"

namespace flashmask::fuzz {

/// A tensor of the call: where it is in which struct, and what is wrong with its pointer.
struct Argument {
  fm_tensor* tensor;
  uint8_t null = 0, misaligned = 0;
  bool readable = true;
};

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

/// Gives `t` this dtype and shape: contiguous, or with another `layout`.
void lay_out(fm_tensor& t, int32_t dtype, std::initializer_list<int64_t> shape, uint8_t layout = 0);

}  // namespace flashmask::fuzz
