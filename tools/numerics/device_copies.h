// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>

#include "flashmask/mask.h"
#include "flashmask/plan.h"
#include "numerics/device_memory.h"
#include "numerics/tensor.h"

namespace flashmask::numerics {

/// Device that holds the copies.
inline constexpr Device kDevice{Device::Kind::kCuda, 0};

/// A host tensor's memory, gaps and guards included, on the device.
class DeviceTensor {
 public:
  explicit DeviceTensor(const Tensor& host);
  const TensorView& view() const { return view_; }
  /// The first `count` entries of the first dimension.
  TensorView view(int64_t count) const;
  /// Copies everything back into the tensor it was made from.
  void copy_to(Tensor& host) const { memory_.copy_to(host.storage()); }

 private:
  DeviceMemory memory_;
  TensorView view_;
};

/// A mask whose contents are on the device, with its memory: the startend_row_indices of the smallest form that has the
/// vectors, interleaved as FlashMask has them, or the interval lists, the block mask and the positions.
class DeviceMask {
 public:
  explicit DeviceMask(const Mask& host);
  const Mask& mask() const { return mask_; }

 private:
  std::optional<DeviceMemory> indices_, blocks_, q_pos_, k_pos_, column_ptr_, intervals_;
  Mask mask_;
};

/// A plan on the device.
class DevicePlan {
 public:
  /// Takes the memory for the smallest plan of `mask`, whose contents are on the device and may be read.
  explicit DevicePlan(const Mask& mask);
  explicit DevicePlan(const PlanLayout& layout);
  /// Builds it, of `mask` as the call computes with it; waits for the device if it may not fit.
  void build(const Mask& mask) { build_plan(mask.view(), view_.layout(), memory_.bytes(), kDevice); }
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

}  // namespace flashmask::numerics
