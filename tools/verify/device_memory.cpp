// SPDX-License-Identifier: Apache-2.0
#include "verify/device_memory.h"

#include <fmt/format.h>

#include "flashmask/status.h"

#ifdef FLASHMASK_WITH_CUDA

#include <cuda_runtime_api.h>

namespace flashmask::verify {
namespace {

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  throw Error(error == cudaErrorMemoryAllocation ? ErrorCode::kOutOfMemory : ErrorCode::kInternal,
              fmt::format("{}: {}", what, cudaGetErrorString(error)));
}

}  // namespace

DeviceMemory::DeviceMemory(std::span<const std::byte> from) : size_(from.size()) {
  if (size_ == 0) return;
  void* data = nullptr;
  check(cudaMalloc(&data, size_), "cudaMalloc");
  data_ = static_cast<std::byte*>(data);
  if (const cudaError_t error = cudaMemcpy(data_, from.data(), size_, cudaMemcpyHostToDevice); error != cudaSuccess) {
    cudaFree(data_);
    check(error, "copy to the device");
  }
}

DeviceMemory::~DeviceMemory() {
  if (data_) cudaFree(data_);
}

void DeviceMemory::copy_to(std::span<std::byte> to) const {
  if (size_ > 0) check(cudaMemcpy(to.data(), data_, size_, cudaMemcpyDeviceToHost), "copy from the device");
}

}  // namespace flashmask::verify

#else

namespace flashmask::verify {

DeviceMemory::DeviceMemory(std::span<const std::byte>) {
  throw Error(ErrorCode::kNoDevice, "this program was built without CUDA");
}
DeviceMemory::~DeviceMemory() = default;
void DeviceMemory::copy_to(std::span<std::byte>) const {}

}  // namespace flashmask::verify

#endif
