// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/cache/row_copy.cuh"
#include "backends/cuda/ptx/async_arrive.cuh"
#include "backends/cuda/ptx/barrier.cuh"

namespace flashmask::sm90 {

/// The thread's arrival, once its chunks are there.
__device__ __forceinline__ void arrive_after(const cuda::RowCopy& copy, uint64_t& barrier) {
  if (copy.aligned) {
    ptx::arrive_after_copies(barrier);
  } else {
    ptx::arrive(barrier);
  }
}

}  // namespace flashmask::sm90
