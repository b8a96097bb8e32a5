// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "common/message.h"

namespace flashmask {

/// Alignment of a workspace's parts in bytes: as much as cudaMalloc gives.
inline constexpr int64_t kWorkspaceAlignment = 256;

/// Size of a workspace of any alignment in which `bytes` aligned ones lie.
inline std::size_t padded_workspace(int64_t bytes) {
  return bytes == 0 ? 0 : static_cast<std::size_t>(bytes + kWorkspaceAlignment);
}

/// The first aligned byte.
inline std::byte* aligned(std::span<std::byte> memory) {
  void* begin = memory.data();
  std::size_t space = memory.size();
  return static_cast<std::byte*>(std::align(kWorkspaceAlignment, 1, begin, space));
}

/// Throws unless the workspace has the bytes that a call needs.
inline void check_workspace(std::span<std::byte> workspace, std::size_t needed) {
  if (workspace.size() < needed)
    throw_invalid("workspace has ", workspace.size(), " bytes; this call needs ", needed,
                  " (query it with the same arguments and options)");
}

}  // namespace flashmask
