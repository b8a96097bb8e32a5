// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/device/row_threads.h"
#include "backends/cuda/device/variant.h"
#include "flashmask/data_type.h"

namespace flashmask::sm90::bwd {

using cuda::kRowThreads;

/// A kernel over tiles: __global__ void (BackwardParams), or, of a variant with features, of FeaturedBackwardParams.
/// The build makes a definition from instance.cu.in for each element type, row of kBackwardTiles and row of
/// kBackwardVariants that fits the tile.
template <DataType dtype, int head_dim, int head_dim_v, int consumers, int variant>
cuda::CompiledKernel backward_kernel();

/// The kernels before and after the ones over tiles of a unit, with kRowThreads threads each.
struct RowKernels {
  const void* preprocess = nullptr;  ///< __global__ void (RowParams): a block for every query tile
  const void* convert_dq = nullptr;  ///< __global__ void (RowParams), as preprocess
  const void* reduce_dkv = nullptr;  ///< __global__ void (KeyParams): after `.split`, two blocks for every key tile
};
/// The build makes a definition from rows.cu.in for each element type, row of kBackwardTiles and unit. Kernels of
/// Unit::kPartial read out and write gradients in fp32.
template <DataType dtype, int head_dim, int head_dim_v, int consumers, cuda::Unit unit>
RowKernels row_kernels();

/// The kernel that computes a sink's gradient after the other kernels of an element type.
struct SinkInstance {
  const char* id;
  const void* kernel;  ///< __global__ void (SinkGradientParams): a block of kRowThreads for every query head
};
SinkInstance sink_instance(DataType dtype);

/// The kernel that measures the keys before the other kernels of an element type, in deterministic mode.
struct MagnitudeInstance {
  const char* id;
  const void* kernel;  ///< __global__ void (cuda::KeyMagnitudeParams): a block of kRowThreads for each kKeys keys
};
MagnitudeInstance magnitude_instance(DataType dtype);

}  // namespace flashmask::sm90::bwd
