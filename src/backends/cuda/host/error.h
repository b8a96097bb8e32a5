// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "common/message.h"
#include "flashmask/status.h"

namespace flashmask::cuda {

/// Throws Error (kOutOfMemory for a failed allocation, kInternal otherwise) with CUDA's own words unless
/// `error` is success; `what` says what was being done. Clears CUDA's record of the error, so that it is not reported
/// again by an unrelated check.
inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  throw Error(error == cudaErrorMemoryAllocation ? ErrorCode::kOutOfMemory : ErrorCode::kInternal,
              message("CUDA: ", what, ": ", cudaGetErrorString(error), " (", cudaGetErrorName(error), ")"));
}

}  // namespace flashmask::cuda
