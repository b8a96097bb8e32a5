// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/sm80/forward/params.h"
#include "backends/cuda/sm80/tile_config.h"
#include "flashmask/data_type.h"

namespace flashmask::sm80 {

/// The compiled forward kernels of a row of kForwardTiles and an element type.
struct ForwardInstance {
  const char* id;           ///< of the plain kernel, see KernelInfo
  const char* featured_id;  ///< of the kernel of features
  ForwardTile tile;
  void (*kernel)(ForwardParams);
  void (*featured)(FeaturedForwardParams);
  int threads, shared_bytes;
};

/// Defined by what the build makes of instance.cu.in for each row and element type.
template <DataType dtype, int head_dim, int head_dim_v, int kilobytes>
ForwardInstance forward_instance();

}  // namespace flashmask::sm80
