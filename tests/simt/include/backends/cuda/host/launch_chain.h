// SPDX-License-Identifier: Apache-2.0
#pragma once

// In place of the header of this name: runs kernels on the host, at once.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backends/cuda/host/error.h"
#include "simt/runtime.h"

namespace flashmask::cuda {

class LaunchChain {
 public:
  enum First { kWait, kOverlapPrevious };
  explicit LaunchChain(cudaStream_t, First = kWait) {}

  template <typename... Args>
  void launch(const char* what, void (*kernel)(Args...), int64_t blocks, int threads, Args... args) {
    launch(what, kernel, blocks, threads, 0, args...);
  }
  template <typename... Args>
  void launch(const char* what, void (*kernel)(Args...), int64_t blocks, int threads, int shared_bytes, Args... args) {
    if (blocks == 0) return;
    check(simt::allows_launch(reinterpret_cast<const void*>(kernel), shared_bytes), what);
    simt::record_launch(reinterpret_cast<const void*>(kernel), what,
                        simt::launch(kernel, blocks, threads, shared_bytes, args...));
  }
};

}  // namespace flashmask::cuda
