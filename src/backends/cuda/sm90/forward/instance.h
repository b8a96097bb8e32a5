// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/sm90/tile_config.h"
#include "flashmask/tensor.h"

namespace flashmask::sm90 {

/// A compiled forward kernel of a row of kForwardTiles and an element type.
struct ForwardInstance {
  const char* id;  ///< of the kernel, see KernelInfo
  DataType dtype;
  ForwardTile tile;
  const void* kernel;  ///< __global__ void (ForwardParams), or of (FeaturedForwardParams)
  int threads;
  int shared_bytes;
};

/// Defined by the translation unit that the build makes for each row, element type, and with and without features
/// (instance.cu.in).
template <DataType dtype, int head_dim, int head_dim_v, int consumers, bool featured>
ForwardInstance forward_instance();

}  // namespace flashmask::sm90
