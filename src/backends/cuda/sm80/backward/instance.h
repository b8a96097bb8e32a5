// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/device/row_threads.h"
#include "backends/cuda/device/variant.h"
#include "backends/cuda/sm80/backward/params.h"
#include "backends/cuda/sm80/tile_config.h"
#include "flashmask/data_type.h"

namespace flashmask::sm80::bwd {

/// The kernel over key tiles, void (*)(BackwardParams). The build defines it from instance.cu.in, for each element
/// type, row of kBackwardTiles and row of kBackwardVariants for that tile.
template <DataType dtype, int head_dim, int head_dim_v, int kilobytes, int variant>
cuda::CompiledKernel backward_kernel();

/// The kernels before and after it, with a block of cuda::kRowThreads for each row tile. The build defines them from
/// rows.cu.in, for each element type and row of kBackwardTiles.
struct RowKernels {
  void (*preprocess)(RowParams) = nullptr;
  void (*convert_dq)(RowParams) = nullptr;
};
template <DataType dtype, int head_dim, int head_dim_v, int kilobytes>
RowKernels row_kernels();

/// The kernel that measures keys of an element type in deterministic mode, before the others run.
struct MagnitudeInstance {
  const char* id;
  void (*kernel)(cuda::KeyMagnitudeParams);  ///< a block of cuda::kRowThreads for each kKeys keys of a key head
};
MagnitudeInstance magnitude_instance(DataType dtype);

/// The kernel that adds up the parts of an element type's dk and dv, after the others.
struct ReduceInstance {
  const char* id;
  void (*kernel)(KeyParams);  ///< blocks of cuda::kRowThreads
};
ReduceInstance reduce_instance(DataType dtype);

/// The kernel that computes a sink's gradient for an element type, after the others.
struct SinkInstance {
  const char* id;
  void (*kernel)(SinkGradientParams);  ///< a block of cuda::kRowThreads for each query head
};
SinkInstance sink_instance(DataType dtype);

}  // namespace flashmask::sm80::bwd
