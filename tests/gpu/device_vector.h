// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

/// First line of a test or SetUp that runs on a GPU.
#define FLASHMASK_NEEDS_GPU()                                                                                     \
  do {                                                                                                            \
    int flashmask_devices = 0;                                                                                    \
    if (const cudaError_t e = cudaGetDeviceCount(&flashmask_devices); e != cudaSuccess || flashmask_devices == 0) \
      GTEST_SKIP() << "needs a GPU: " << cudaGetErrorString(e);                                                   \
  } while (0)

namespace flashmask::test {

inline void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(error));
}

/// Elements in device memory.
template <typename T>
class DeviceVector {
 public:
  explicit DeviceVector(const std::vector<T>& values) : size_(values.size()) {
    check(cudaMalloc(reinterpret_cast<void**>(&data_), size_ * sizeof(T) + 1));
    check(cudaMemcpy(data_, values.data(), size_ * sizeof(T), cudaMemcpyHostToDevice));
  }
  ~DeviceVector() { cudaFree(data_); }
  DeviceVector(const DeviceVector&) = delete;
  DeviceVector& operator=(const DeviceVector&) = delete;

  T* data() const { return data_; }
  std::size_t size() const { return size_; }
  /// Waits for the device; throws if a kernel before it failed.
  std::vector<T> to_host() const {
    std::vector<T> values(size_);
    check(cudaDeviceSynchronize());
    check(cudaMemcpy(values.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  T* data_ = nullptr;
  std::size_t size_;
};

}  // namespace flashmask::test
