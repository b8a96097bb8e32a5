// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "common/message.h"
#include "flashmask/mask.h"

namespace flashmask {

/// "CUDA device 1" or "the CPU".
inline std::string describe(const Device& device) {
  return device.kind == Device::Kind::kCpu ? "the CPU" : message("CUDA device ", device.index);
}

/// True if a mask has contents; one that is only a band goes anywhere.
inline bool has_contents(const MaskView& view) {
  return view.lts || view.lte || view.uts || view.ute || view.column_ptr || view.block_mask || view.q_pos;
}

/// Throws kInvalidArgument, naming the device, if the mask's vectors are not in host memory, where `reader`
/// ("to_dense") would read them.
inline void require_host(const MaskView& view, const char* reader) {
  if (view.device.kind == Device::Kind::kCpu) return;
  throw_invalid(reader, " reads the mask's contents, which are on ", describe(view.device),
                "; make the mask from a copy of them in host memory");
}

}  // namespace flashmask
