// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backends/cuda/host/error.h"

namespace flashmask::cuda {

/// Launches kernels one after the other; from the second on, and where the device can, each while the one before
/// still runs (it waits inside, by cudaGridDependencySynchronize, for what that wrote). With kOverlapPrevious the first
/// does the same with what the stream held before.
class LaunchChain {
 public:
  enum First { kWait, kOverlapPrevious };
  explicit LaunchChain(cudaStream_t stream, First first = kWait) : stream_(stream), first_(first == kWait) {
    int device = 0, major = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
    // The code for 9.0 waits for the kernel before it. The PTX that later devices run is older than that wait.
    overlaps_ = major == 9;
  }

  /// No blocks, no launch.
  template <typename... Args>
  void launch(const char* what, void (*kernel)(Args...), int64_t blocks, int threads, Args... args) {
    launch(what, kernel, blocks, threads, 0, args...);
  }
  /// Launches a kernel with dynamic shared memory.
  template <typename... Args>
  void launch(const char* what, void (*kernel)(Args...), int64_t blocks, int threads, int shared_bytes, Args... args) {
    void* arguments[] = {&args...};
    launch(what, reinterpret_cast<const void*>(kernel), blocks, threads, shared_bytes, arguments);
  }
  /// Launches a kernel of any type, with dynamic shared memory, in clusters of `cluster` blocks, which divide `blocks`.
  void launch(const char* what, const void* kernel, int64_t blocks, int threads, int shared_bytes, void** arguments,
              int cluster = 1) {
    if (blocks == 0) return;
    cudaLaunchAttribute attributes[2]{};
    unsigned count = 0;
    if (overlaps_ && !first_) {
      cudaLaunchAttribute& overlap = attributes[count++];
      overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      overlap.val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster > 1) {
      cudaLaunchAttribute& clusters = attributes[count++];
      clusters.id = cudaLaunchAttributeClusterDimension;
      clusters.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    }
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
    config.stream = stream_;
    config.attrs = attributes;
    config.numAttrs = count;
    check(cudaLaunchKernelExC(&config, kernel, arguments), what);
    first_ = false;
  }

 private:
  cudaStream_t stream_;
  bool overlaps_ = false, first_;  ///< first_: the next kernel waits for everything before it
};

}  // namespace flashmask::cuda
