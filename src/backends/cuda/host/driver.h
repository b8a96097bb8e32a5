// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>

namespace flashmask::cuda {

/// Functions of libcuda, fetched through the runtime when they are first needed: the library itself is not
/// linked against libcuda, so that it loads on machines without a driver.
struct Driver {
  decltype(&::cuTensorMapEncodeTiled) tensor_map_encode_tiled = nullptr;
  decltype(&::cuGetErrorString) get_error_string = nullptr;
  decltype(&::cuCtxGetCurrent) get_current_context = nullptr;
  decltype(&::cuStreamWaitValue32) stream_wait_value = nullptr;
  decltype(&::cuStreamWriteValue32) stream_write_value = nullptr;
};

/// Throws Error naming the function that the driver does not have.
const Driver& driver();

/// CUDA's words for a driver error.
const char* driver_error(CUresult result);

}  // namespace flashmask::cuda
