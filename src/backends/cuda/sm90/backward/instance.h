// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/sm90/tile_config.h"
#include "flashmask/tensor.h"

namespace flashmask::sm90::bwd {

/// The compiled backward kernels of a row of kBackwardTiles and an element type.
struct BackwardInstance {
  const char* id;  ///< of `kernel`, see KernelInfo; the others' ids begin with it
  DataType dtype;
  BackwardTile tile;
  const void* preprocess;  ///< __global__ void (RowParams): a block of kRowThreads for every query tile
  const void* kernel;      ///< __global__ void (BackwardParams)
  const void* split;       ///< the same, whose work tiles have a part of their key head's query heads
  const void* positions;   ///< __global__ void (FeaturedBackwardParams): `kernel` with a band over positions
  const void* positions_split;
  const void* convert_dq;  ///< __global__ void (RowParams), as preprocess
  const void* reduce_dkv;  ///< __global__ void (KeyParams): after `split`, two blocks of kRowThreads for every key tile
  int threads;             ///< of `kernel`, `split` and those with positions
  int shared_bytes;        ///< the same
};

inline constexpr int kRowThreads = 256;

/// Defined by the translation unit that the build makes for each row and element type (instance.cu.in).
template <DataType dtype, int head_dim, int head_dim_v, int consumers>
BackwardInstance backward_instance();

}  // namespace flashmask::sm90::bwd
