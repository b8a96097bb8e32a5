// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "flashmask/float16.h"
#include "flashmask/tensor.h"

namespace flashmask::run {

/// Rounds a float to what `dtype` (float32, bfloat16, float16) can hold.
inline float round_to(DataType dtype, float value) {
  if (dtype == DataType::kBFloat16) return bfloat16_to_float(float_to_bfloat16(value));
  if (dtype == DataType::kFloat16) return float16_to_float(float_to_float16(value));
  return value;
}

/// A contiguous tensor of float32, bfloat16 or float16 that owns its memory, aligned for SIMD. Its first
/// dimension can be cut short without moving anything.
class Tensor {
 public:
  Tensor(DataType dtype, std::vector<int64_t> shape);

  DataType dtype() const { return dtype_; }
  int64_t size() const { return size_; }
  /// Elements of one entry of the first dimension.
  int64_t stride() const { return stride_; }
  /// The first `count` entries of the first dimension.
  TensorView view(int64_t count) const;
  std::span<const std::byte> bytes(int64_t count) const {
    return {data_.get(), static_cast<std::size_t>(count * stride_) * element_size(dtype_)};
  }

  float at(int64_t element) const {
    const std::byte* data = data_.get();
    if (dtype_ == DataType::kBFloat16) return bfloat16_to_float(reinterpret_cast<const uint16_t*>(data)[element]);
    if (dtype_ == DataType::kFloat16) return float16_to_float(reinterpret_cast<const uint16_t*>(data)[element]);
    return reinterpret_cast<const float*>(data)[element];
  }
  void set(int64_t element, float value) {
    std::byte* data = data_.get();
    if (dtype_ == DataType::kFloat32) {
      reinterpret_cast<float*>(data)[element] = value;
    } else {
      reinterpret_cast<uint16_t*>(data)[element] =
          dtype_ == DataType::kBFloat16 ? float_to_bfloat16(value) : float_to_float16(value);
    }
  }
  /// Every element becomes NaN: one that a call forgets to write is then found.
  void poison();

 private:
  struct Free {
    void operator()(std::byte* data) const;
  };
  DataType dtype_;
  std::vector<int64_t> shape_;
  int64_t size_ = 1, stride_ = 1;
  std::unique_ptr<std::byte, Free> data_;
};

/// Calls f(begin, end) on disjoint ranges that make up [0, count), from `threads` threads (0: one for each
/// processor).
void parallel_for(int64_t count, int threads, const std::function<void(int64_t begin, int64_t end)>& f);

}  // namespace flashmask::run
