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
  const void* convert_dq;  ///< __global__ void (RowParams), as preprocess
  const void* reduce_dkv;  ///< __global__ void (KeyParams): after `split`, two blocks of kRowThreads for every key tile
  int threads;             ///< of `kernel` and `split`
  int shared_bytes;        ///< of `kernel` and `split`
};

/// The compiled kernels of features of a row of kFeaturedBackwardTiles and an element type. They have threads and shared
/// memory as the row's plain kernel, whose convert_dq and reduce_dkv follow them.
struct FeaturedInstance {
  /// __global__ void (FeaturedBackwardParams)
  struct Kernels {
    const void* kernel;
    const void* split;  ///< as BackwardInstance's
  };
  const char* id;          ///< which the kernels' ids begin with
  const void* preprocess;  ///< as BackwardInstance's
  Kernels softcap, dropout, both;
  const void* dsink;  ///< __global__ void (SinkGradientParams), also after plain kernels: a block of kRowThreads a head
};

inline constexpr int kRowThreads = 256;

/// Defined by the translation unit that the build makes for each row and element type (instance.cu.in).
template <DataType dtype, int head_dim, int head_dim_v, int consumers>
BackwardInstance backward_instance();

template <DataType dtype, int head_dim, int head_dim_v, int consumers>
FeaturedInstance featured_instance();

}  // namespace flashmask::sm90::bwd
