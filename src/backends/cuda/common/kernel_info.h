// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <string>
#include <utility>

#include "flashmask/attention.h"

namespace flashmask::cuda {

/// What is known of a kernel by its id, which begins with the architecture; its entry is the id with underscores for dots.
inline KernelInfo kernel_info(std::string id, TileShape tile, int threads, int shared_bytes) {
  std::string arch = id.substr(0, id.find('.')), symbol = "flashmask_" + id;
  std::replace(symbol.begin(), symbol.end(), '.', '_');
  return {std::move(id), std::move(arch), std::move(symbol), tile, threads, shared_bytes};
}

}  // namespace flashmask::cuda
