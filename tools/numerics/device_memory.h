// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>

namespace flashmask::numerics {

/// Memory of CUDA device 0. In a build without CUDA every use throws Error.
class DeviceMemory {
 public:
  /// Memory that holds anything.
  explicit DeviceMemory(std::size_t size);
  /// A copy of `from`.
  explicit DeviceMemory(std::span<const std::byte> from);
  ~DeviceMemory();
  DeviceMemory(DeviceMemory&& other) noexcept : data_(other.data_), size_(other.size_) { other.data_ = nullptr; }
  DeviceMemory& operator=(DeviceMemory&&) = delete;
  DeviceMemory(const DeviceMemory&) = delete;

  std::span<std::byte> bytes() const { return {data_, size_}; }
  /// Copies everything back, after all that was put on the default stream before.
  void copy_to(std::span<std::byte> to) const;

 private:
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

/// Waits until everything that was put on the device is done.
void wait_for_device();

}  // namespace flashmask::numerics
