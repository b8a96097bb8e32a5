// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <vector>

#include "flashmask/tensor.h"
#include "numerics/device_memory.h"

namespace flashmask::verify {

/// Copies of host tensors on CUDA device 0, from the first element of each to the last, gaps included.
class DeviceViews {
 public:
  /// Makes the views those of copies. Undefined ones stay as they are.
  explicit DeviceViews(const std::vector<TensorView*>& views);
  /// Copies the tensor that a view was of back, after all that was put on the default stream before.
  void copy_back(const TensorView& view) const;

 private:
  struct Copy {
    std::byte* host;
    std::size_t bytes;
    numerics::DeviceMemory memory;
  };
  std::vector<Copy> copies_;
};

}  // namespace flashmask::verify
