// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/device/row_threads.h"
#include "backends/cuda/sm80/backward/params.h"
#include "backends/cuda/sm80/tile_config.h"
#include "flashmask/data_type.h"

namespace flashmask::sm80::bwd {

/// The compiled backward kernels, without features or with, of a row of kBackwardTiles and an element type.
struct BackwardInstance {
  const char* id;  ///< of the kernel over key tiles, see KernelInfo; the others' ids begin with it
  DataType dtype;
  BackwardTile tile;
  void (*preprocess)(RowParams);  ///< a block of cuda::kRowThreads for each row tile
  void (*kernel)(BackwardParams);
  void (*convert_dq)(RowParams);  ///< as preprocess
  int threads, shared_bytes;      ///< of the kernel over key tiles
};

/// Defined by what the build makes of instance.cu.in for each row and element type, without
/// features and with.
template <DataType dtype, int head_dim, int head_dim_v, int kilobytes, bool featured>
BackwardInstance backward_instance();

/// The kernel that measures keys before those of an element type, in deterministic mode.
struct MagnitudeInstance {
  const char* id;
  void (*kernel)(MagnitudeParams);  ///< a block of cuda::kRowThreads for each kKeys keys of a key head
};
MagnitudeInstance magnitude_instance(DataType dtype);

/// The kernel that finds the extents of a dense mask before them.
struct DenseExtentInstance {
  const char* id;
  void (*kernel)(DenseExtentParams);  ///< blocks of cuda::kRowThreads
};
DenseExtentInstance dense_extent_instance();

/// The kernel that adds up the parts of dk and dv after those of an element type.
struct ReduceInstance {
  const char* id;
  void (*kernel)(KeyParams);  ///< blocks of cuda::kRowThreads
};
ReduceInstance reduce_instance(DataType dtype);

/// The kernel that computes a sink's gradient after those of an element type.
struct SinkInstance {
  const char* id;
  void (*kernel)(SinkGradientParams);  ///< a block of cuda::kRowThreads for each query head
};
SinkInstance sink_instance(DataType dtype);

}  // namespace flashmask::sm80::bwd
