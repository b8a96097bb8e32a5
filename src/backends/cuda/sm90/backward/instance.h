// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/device/row_threads.h"
#include "backends/cuda/sm90/tile_config.h"
#include "flashmask/data_type.h"

namespace flashmask::sm90::bwd {

/// The compiled backward kernels, without features or with, of a row of kBackwardTiles and an element type.
struct BackwardInstance {
  const char* id;  ///< of `kernel`, see KernelInfo; the others' ids begin with it
  DataType dtype;
  BackwardTile tile;
  const void* preprocess;     ///< __global__ void (RowParams): a block of kRowThreads for every query tile
  const void* kernel;         ///< __global__ void (BackwardParams), or of (FeaturedBackwardParams)
  const void* split;          ///< the same, whose work tiles have a part of their key head's query heads
  const void* deterministic;  ///< as `kernel`, but sums dq up in integers; null for the kernels of features, which
                              ///< do either
  const void* deterministic_split;  ///< the same of `split`
  const void* light;        ///< __global__ void (FeaturedBackwardParams): `kernel` with a band over positions and the
                            ///< same bits, in either mode; null for the kernels of features, which have such bands
                            ///< themselves
  const void* light_split;  ///< the same of `split`
  const void* convert_dq;   ///< __global__ void (RowParams), as preprocess
  const void* reduce_dkv;  ///< __global__ void (KeyParams): after `split`, two blocks of kRowThreads for every key tile
  int threads;             ///< of all kernels above but `preprocess`
  int shared_bytes;        ///< the same
};

/// The compiled kernels of partial results of a row of kBackwardTiles and an element type: they run before and after
/// BackwardInstance::split, which leaves dk and dv in fp32 whatever the tensors' type is.
struct PartialInstance {
  const char* id;          ///< what the kernels' ids begin with
  const void* preprocess;  ///< as BackwardInstance's, of out and dq in fp32
  const void* convert_dq;  ///< as BackwardInstance's, to dq in fp32
  const void* reduce_dkv;  ///< as BackwardInstance's, to dk and dv in fp32
};

using cuda::kRowThreads;

/// Defined by what the build makes of instance.cu.in for each row and element type, without
/// features and with.
template <DataType dtype, int head_dim, int head_dim_v, int consumers, bool featured>
BackwardInstance backward_instance();
/// The same of partial results (partial.cu.in).
template <DataType dtype, int head_dim, int head_dim_v, int consumers>
PartialInstance partial_backward_instance();

/// The kernel that computes a sink's gradient after those of an element type.
struct SinkInstance {
  const char* id;
  const void* kernel;  ///< __global__ void (SinkGradientParams): a block of kRowThreads for every query head
};
SinkInstance sink_instance(DataType dtype);

/// The kernel that measures the keys before those of an element type, in deterministic mode.
struct MagnitudeInstance {
  const char* id;
  const void* kernel;  ///< __global__ void (cuda::KeyMagnitudeParams): a block of kRowThreads for each kKeys keys
};
MagnitudeInstance magnitude_instance(DataType dtype);

}  // namespace flashmask::sm90::bwd
