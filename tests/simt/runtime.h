// SPDX-License-Identifier: Apache-2.0
#pragma once

// The part of the CUDA runtime that the library and its tools call, over host memory: in programs that link runtime.cpp
// instead of the runtime's library. Device 0 is an A100 (compute capability 8.0, 163 KiB of shared memory for a block),
// 1 an A10 (8.6, 99 KiB), 2 an L4 (8.9, 99 KiB); CUDA_VISIBLE_DEVICES=1 makes the second the only one, and
// FLASHMASK_SIMT_MULTIPROCESSORS gives each so many multiprocessors, or with commas each its own number. Work on a
// stream is done before the call returns.

#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "simt/machine.h"

namespace simt {

/// Checks that a launch may have so much dynamic shared memory on the current device: more than 48 KiB need
/// cudaFuncSetAttribute first.
cudaError_t allows_launch(const void* kernel, int shared_bytes);

struct LaunchRecord {
  const void* kernel;
  std::string what;  ///< as the library's messages call it
  Counts counts;
};

void record_launch(const void* kernel, const char* what, const Counts& counts);
/// Returns the calling thread's launches since its last call.
std::vector<LaunchRecord> drain_launches();

}  // namespace simt
