// SPDX-License-Identifier: Apache-2.0
#pragma once

// Checks of tensors against the shape, dtype and device that a call needs.

#include <cstdint>
#include <initializer_list>

#include "flashmask/tensor.h"

namespace flashmask {

inline constexpr int64_t kMaxHeadDim = 256;

struct Requirement {
  std::initializer_list<int64_t> shape;
  const char* meaning;  ///< the shape in words, for messages
  DataType dtype;
  bool row_contiguous;  ///< last dimension must have stride 1
  bool output;
};

/// Throws unless strides are at least 0, those of an output reach each element once, and rows are contiguous where they
/// have to be.
void check_strides(const char* argument, const TensorView& t, bool row_contiguous, bool output);

/// Throws unless the tensor is as needed and on `device`, q's. `with_data`: also that its pointer is there.
void check_tensor(const char* argument, const TensorView& t, const Requirement& need, const Device& device,
                  bool with_data);

/// Throws unless tensors of one call are on one device.
void check_device(const char* argument, const TensorView& t, const Device& device);

bool is_one_of(int64_t n, std::initializer_list<int64_t> accepted);

/// Throws unless both are at least 1 and heads_q is a multiple.
void check_heads(int64_t heads_q, int64_t heads_kv);

/// Throws unless both are between 1 and kMaxHeadDim.
void check_head_dims(int64_t head_dim, int64_t head_dim_v);

/// Throws unless it is a dtype that q may have.
void check_q_dtype(const TensorView& q);

}  // namespace flashmask
