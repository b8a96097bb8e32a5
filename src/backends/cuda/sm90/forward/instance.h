// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "flashmask/tensor.h"

namespace flashmask::sm90 {

/// One compiled configuration of the forward kernel, a line of instances.def.
struct ForwardInstance {
  const char* id;  ///< of the kernel, see KernelInfo
  DataType dtype;
  int head_dim;
  int consumers;       ///< consumer warpgroups, each with 64 query rows of the tile
  int keys;            ///< of a tile
  const void* kernel;  ///< __global__ void (ForwardParams)
  int threads;
  int shared_bytes;
};

#define FLASHMASK_FORWARD(dtype, element, head_dim, consumers) ForwardInstance forward_##element##_##head_dim##_##consumers();
#include "backends/cuda/sm90/forward/instances.def"
#undef FLASHMASK_FORWARD

}  // namespace flashmask::sm90
