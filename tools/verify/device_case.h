// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>

#include "flashmask/mask.h"
#include "flashmask/plan.h"
#include "verify/case_masks.h"
#include "verify/device_memory.h"

namespace flashmask::verify {

/// Where the copies are.
inline constexpr Device kDevice{Device::Kind::kCuda, 0};

/// A host tensor's memory, gaps and guards included, on the device.
class DeviceTensor {
 public:
  explicit DeviceTensor(const Tensor& host);
  const TensorView& view() const { return view_; }
  /// Copies everything back into the tensor it was made from.
  void copy_to(Tensor& host) const { memory_.copy_to(host.storage()); }

 private:
  DeviceMemory memory_;
  TensorView view_;
};

/// A mask whose contents are on the device, with its memory: the startend_row_indices of the smallest form that has the
/// vectors, interleaved as FlashMask has them, the block mask and the positions.
class DeviceMask {
 public:
  explicit DeviceMask(const Mask& host);
  const Mask& mask() const { return mask_; }

 private:
  std::optional<DeviceMemory> indices_, blocks_, q_pos_, k_pos_;
  Mask mask_;
};

/// A plan built on the device.
class DevicePlan {
 public:
  /// `mask` as the call computes with it.
  explicit DevicePlan(const Mask& mask);
  const PlanView& view() const { return view_; }

 private:
  DeviceMemory memory_;
  PlanView view_;
};

/// Device memory full of poison, with guards around it.
class DeviceWorkspace {
 public:
  DeviceWorkspace(std::size_t size, std::size_t offset) : host_(size, offset), memory_(host_.storage()) {}
  std::span<std::byte> bytes() const { return memory_.bytes().subspan(host_.begin(), host_.size()); }
  /// Waits for the device.
  bool guards_intact() {
    memory_.copy_to(host_.storage());
    return host_.guards_intact();
  }

 private:
  PoisonedBytes host_;
  DeviceMemory memory_;
};

}  // namespace flashmask::verify
