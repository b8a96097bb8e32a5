// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/sm90/tile_config.h"
#include "flashmask/data_type.h"

namespace flashmask::sm90 {

/// A compiled forward kernel of a row of kForwardTiles and an element type.
struct ForwardInstance {
  const char* id;  ///< of the kernel, see KernelInfo
  DataType dtype;
  ForwardTile tile;
  const void* kernel;  ///< __global__ void (ForwardParams), of (FeaturedForwardParams) or of (PartialForwardParams)
  const void* light;  ///< __global__ void (FeaturedForwardParams): `kernel` with a sink and a band over positions; null
                      ///< for the kernels of features and of partial results, which have them themselves
  int threads;
  int shared_bytes;
};

/// Defined by what the build makes of instance.cu.in for each row and element type, without
/// features and with.
template <DataType dtype, int head_dim, int head_dim_v, int consumers, bool featured>
ForwardInstance forward_instance();
/// The same of partial results (partial.cu.in): rows in fp32, with a sink and a band over positions.
template <DataType dtype, int head_dim, int head_dim_v, int consumers>
ForwardInstance partial_forward_instance();

}  // namespace flashmask::sm90
