// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace flashmask::cuda {

/// The dynamic shared memory of the calling thread's block, aligned to 1024 bytes.
__device__ __forceinline__ unsigned char* dynamic_shared_memory() {
  extern __shared__ __align__(1024) unsigned char memory[];
  return memory;
}

}  // namespace flashmask::cuda
