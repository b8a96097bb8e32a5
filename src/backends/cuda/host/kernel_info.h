// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <string>
#include <utility>

#include "flashmask/attention.h"

namespace flashmask::cuda {

/// Fills in what follows from a kernel's id: the architecture, which it begins with, and the entry, which is the id
/// with underscores for dots.
inline KernelInfo named(KernelInfo info) {
  info.arch = info.id.substr(0, info.id.find('.'));
  info.symbol = "flashmask_" + info.id;
  std::replace(info.symbol.begin(), info.symbol.end(), '.', '_');
  return info;
}

/// A kernel of a tile of some head dims; `shape`: its rows and keys, one of them 0 in a pass over the other.
template <typename Tile>
KernelInfo tile_kernel_info(std::string id, const char* op, DataType dtype, const Tile& tile, TileShape shape,
                            int threads, int shared_bytes = 0) {
  return named({.id = std::move(id),
                .op = op,
                .dtype = dtype,
                .head_dim = tile.head_dim,
                .head_dim_v = tile.head_dim_v,
                .tile = shape,
                .threads = threads,
                .shared_bytes = shared_bytes});
}

/// A kernel of a KernelTable.
template <typename Kernel>
KernelInfo table_kernel_info(const Kernel& kernel, const char* op, DataType dtype, TileShape shape) {
  const auto& compiled = kernel.compiled;
  return tile_kernel_info(kernel.id, op, dtype, *kernel.tile, shape, compiled.threads, compiled.shared_bytes);
}

}  // namespace flashmask::cuda
