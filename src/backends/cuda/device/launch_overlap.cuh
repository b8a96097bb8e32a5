// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

namespace flashmask::cuda {

// The device's side of LaunchChain. Before compute capability 9.0 kernels of a stream do not overlap.

/// Lets the next kernel of the stream be launched while this one runs; it waits in wait_for_previous().
__device__ inline void allow_next() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

/// Waits until the kernel before is done and what it wrote is visible. Every block of every kernel but the first
/// calls it, so that a kernel that is done implies that all before it are.
__device__ inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

}  // namespace flashmask::cuda
