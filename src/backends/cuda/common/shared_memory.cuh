// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace flashmask::cuda {

/// The CTA's dynamic shared memory.
__device__ __forceinline__ unsigned char* dynamic_shared_memory() {
  extern __shared__ __align__(1024) unsigned char memory[];
  return memory;
}

}  // namespace flashmask::cuda
