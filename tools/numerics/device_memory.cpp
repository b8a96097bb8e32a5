// SPDX-License-Identifier: Apache-2.0
#include "numerics/device_memory.h"

#include <fmt/format.h>

#include <string_view>

#include "flashmask/status.h"

#ifdef FLASHMASK_WITH_CUDA

#include <cuda_runtime_api.h>

namespace flashmask::numerics {
namespace {

void check(cudaError_t error, std::string_view what) {
  if (error == cudaSuccess) return;
  throw Error(error == cudaErrorMemoryAllocation ? ErrorCode::kOutOfMemory : ErrorCode::kInternal,
              fmt::format("{}: {}", what, cudaGetErrorString(error)));
}

}  // namespace

DeviceMemory::DeviceMemory(std::size_t size) : size_(size) {
  if (size_ == 0) return;
  void* data = nullptr;
  check(cudaMalloc(&data, size_), fmt::format("cudaMalloc of {} bytes", size_));
  data_ = static_cast<std::byte*>(data);
}

DeviceMemory::DeviceMemory(std::span<const std::byte> from) : DeviceMemory(from.size()) {
  if (size_ > 0) check(cudaMemcpy(data_, from.data(), size_, cudaMemcpyHostToDevice), "copy to the device");
}

DeviceMemory::~DeviceMemory() {
  if (data_) cudaFree(data_);
}

void DeviceMemory::copy_to(std::span<std::byte> to) const {
  if (size_ > 0) check(cudaMemcpy(to.data(), data_, size_, cudaMemcpyDeviceToHost), "copy from the device");
}

void wait_for_device() { check(cudaDeviceSynchronize(), "work on the device"); }

}  // namespace flashmask::numerics

#else

namespace flashmask::numerics {

DeviceMemory::DeviceMemory(std::size_t) { throw Error(ErrorCode::kNoDevice, "this program was built without CUDA"); }
DeviceMemory::DeviceMemory(std::span<const std::byte> from) : DeviceMemory(from.size()) {}
DeviceMemory::~DeviceMemory() = default;
void DeviceMemory::copy_to(std::span<std::byte>) const {}
void wait_for_device() {}

}  // namespace flashmask::numerics

#endif
