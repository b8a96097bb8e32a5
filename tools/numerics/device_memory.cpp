// SPDX-License-Identifier: Apache-2.0
#include "numerics/device_memory.h"

#include <fmt/format.h>

#include <string_view>

#include "flashmask/status.h"

#ifdef FLASHMASK_WITH_CUDA

#include <cuda_runtime_api.h>

#include <cstdint>

namespace flashmask::numerics {
namespace {

void check(cudaError_t error, std::string_view what) {
  if (error == cudaSuccess) return;
  throw Error(error == cudaErrorMemoryAllocation ? ErrorCode::kOutOfMemory : ErrorCode::kInternal,
              fmt::format("{}: {}", what, cudaGetErrorString(error)));
}

/// True if the device has a memory pool, which then keeps what is freed: cudaMalloc and cudaFree wait for the device,
/// and many threads that check small cases would wait most of the time.
bool has_pool() {
  static const bool has = [] {
    int supported = 0;
    cudaMemPool_t pool = nullptr;
    uint64_t kept = UINT64_MAX;
    return cudaDeviceGetAttribute(&supported, cudaDevAttrMemoryPoolsSupported, 0) == cudaSuccess && supported &&
           cudaDeviceGetDefaultMemPool(&pool, 0) == cudaSuccess &&
           cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &kept) == cudaSuccess;
  }();
  return has;
}

}  // namespace

DeviceMemory::DeviceMemory(std::size_t size) : size_(size) {
  if (size_ == 0) return;
  void* data = nullptr;
  check(has_pool() ? cudaMallocAsync(&data, size_, nullptr) : cudaMalloc(&data, size_),
        fmt::format("allocation of {} bytes on the device", size_));
  data_ = static_cast<std::byte*>(data);
}

DeviceMemory::DeviceMemory(std::span<const std::byte> from) : DeviceMemory(from.size()) {
  if (size_ > 0) check(cudaMemcpy(data_, from.data(), size_, cudaMemcpyHostToDevice), "copy to the device");
}

DeviceMemory::~DeviceMemory() {
  if (!data_) return;
  if (has_pool()) {
    cudaFreeAsync(data_, nullptr);
  } else {
    cudaFree(data_);
  }
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
