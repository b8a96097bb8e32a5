// SPDX-License-Identifier: Apache-2.0
#pragma once

// Masks and bytes in device memory, for tests.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "flashmask/mask.h"

namespace flashmask::test {

inline void require(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

/// Why no test can run on a GPU here; empty if one can.
inline std::string no_device() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) return std::string("no CUDA device: ") + cudaGetErrorString(error);
  return count == 0 ? "no CUDA device" : "";
}

/// Bytes in device memory.
class DeviceBytes {
 public:
  explicit DeviceBytes(std::size_t size) : size_(size) {
    require(cudaMalloc(&data_, size > 0 ? size : 1), "cudaMalloc");
  }
  template <typename T>
  explicit DeviceBytes(const std::vector<T>& values) : DeviceBytes(values.size() * sizeof(T)) {
    copy_from(values);
  }
  DeviceBytes(DeviceBytes&& other) noexcept : data_(std::exchange(other.data_, nullptr)), size_(other.size_) {}
  DeviceBytes& operator=(DeviceBytes&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~DeviceBytes() { cudaFree(data_); }

  template <typename T>
  void copy_from(const std::vector<T>& values) {
    require(cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice),
            "cudaMemcpy to the device");
  }
  void fill(int byte) { require(cudaMemset(data_, byte, size_), "cudaMemset"); }
  std::vector<std::byte> read() const {
    std::vector<std::byte> bytes(size_);
    require(cudaMemcpy(bytes.data(), data_, size_, cudaMemcpyDeviceToHost), "cudaMemcpy from the device");
    return bytes;
  }
  std::byte* data() const { return static_cast<std::byte*>(data_); }
  std::size_t size() const { return size_; }

 private:
  void* data_ = nullptr;
  std::size_t size_ = 0;
};

/// A copy of a mask's contents in device memory, its vectors interleaved as in startend_row_indices with `gap` unused
/// elements after those of each column.
class DeviceMask {
 public:
  explicit DeviceMask(const Mask& mask, int64_t gap = 0)
      : view_(mask.view()),
        stride_(gap),
        vectors_(interleaved(mask)),
        blocks_(copy_of(mask.block_mask())),
        q_pos_(copy_of(mask.q_pos())),
        k_pos_(copy_of(mask.k_pos())),
        column_ptr_(copy_of(mask.column_ptr())),
        intervals_(copy_of(mask.intervals())) {
    const auto* base = reinterpret_cast<const int32_t*>(vectors_.data());
    int64_t n = 0;
    for (const int32_t** vector : {&view_.lts, &view_.lte, &view_.uts, &view_.ute}) {
      if (*vector) *vector = base + n++;
    }
    if (n > 0) view_.bounds_stride = stride_;
    if (view_.block_mask) view_.block_mask = reinterpret_cast<const uint8_t*>(blocks_.data());
    if (view_.q_pos) view_.q_pos = reinterpret_cast<const int32_t*>(q_pos_.data());
    if (view_.k_pos) view_.k_pos = reinterpret_cast<const int32_t*>(k_pos_.data());
    if (view_.column_ptr) view_.column_ptr = reinterpret_cast<const int32_t*>(column_ptr_.data());
    if (view_.intervals) view_.intervals = reinterpret_cast<const int32_t*>(intervals_.data());
    view_.content_hash = 0;
    view_.device = {Device::Kind::kCuda, 0};
  }

  const MaskView& view() const { return view_; }
  /// New contents of the same shapes and vectors.
  void assign(const Mask& mask) {
    stride_ -= static_cast<int64_t>(present(mask).size());
    vectors_.copy_from(interleaved(mask));
    q_pos_.copy_from(copy_of(mask.q_pos()));
    k_pos_.copy_from(copy_of(mask.k_pos()));
  }

 private:
  static std::vector<std::span<const int32_t>> present(const Mask& mask) {
    std::vector<std::span<const int32_t>> vectors;
    for (const auto vector : {mask.lts(), mask.lte(), mask.uts(), mask.ute()}) {
      if (!vector.empty()) vectors.push_back(vector);
    }
    return vectors;
  }
  template <typename T>
  static std::vector<T> copy_of(std::span<const T> values) {
    return {values.begin(), values.end()};
  }

  /// Counts the vectors into stride_.
  std::vector<int32_t> interleaved(const Mask& mask) {
    const auto vectors = present(mask);
    stride_ += static_cast<int64_t>(vectors.size());
    const auto stride = static_cast<std::size_t>(stride_);
    std::vector<int32_t> values(vectors.empty() ? 0 : vectors[0].size() * stride, -12345);
    for (std::size_t n = 0; n < vectors.size(); ++n) {
      for (std::size_t at = 0; at < vectors[n].size(); ++at) values[at * stride + n] = vectors[n][at];
    }
    return values;
  }

  MaskView view_;
  int64_t stride_;
  DeviceBytes vectors_, blocks_, q_pos_, k_pos_, column_ptr_, intervals_;
};

}  // namespace flashmask::test
