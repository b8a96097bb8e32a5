// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "flashmask/tensor.h"

namespace flashmask::sm90::grad {

/// One compiled configuration of the backward kernels, a line of instances.def.
struct BackwardInstance {
  const char* id;          ///< of `kernel`, see KernelInfo; the others' ids begin with it
  DataType dtype;
  int head_dim;
  int rows, keys;          ///< of a tile
  const void* preprocess;  ///< __global__ void (RowParams): a block of kRowThreads for every query tile
  const void* kernel;      ///< __global__ void (BackwardParams)
  const void* split;       ///< the same, for items of a part of their key head's query heads
  const void* convert_dq;  ///< __global__ void (RowParams), as preprocess
  const void* reduce_dkv;  ///< __global__ void (KeyParams): after `split`, two blocks of kRowThreads for every key tile
  int threads;             ///< of `kernel` and `split`
  int shared_bytes;        ///< of `kernel` and `split`
};

inline constexpr int kRowThreads = 256;

#define FLASHMASK_BACKWARD(dtype, element, head_dim, consumers) BackwardInstance backward_##element##_##head_dim##_##consumers();
#include "backends/cuda/sm90/backward/instances.def"
#undef FLASHMASK_BACKWARD

}  // namespace flashmask::sm90::grad
