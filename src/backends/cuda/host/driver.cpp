// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/host/driver.h"

#include <cuda_runtime_api.h>

#include "backends/cuda/host/error.h"

namespace flashmask::cuda {
namespace {

/// The function as it was in CUDA `version`.
template <typename Function>
void fetch(Function& function, const char* name, [[maybe_unused]] unsigned version) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  check(cudaGetDriverEntryPointByVersion(name, &address, version, cudaEnableDefault, &found), name);
#else
  check(cudaGetDriverEntryPoint(name, &address, cudaEnableDefault, &found), name);
#endif
  if (found != cudaDriverEntryPointSuccess || !address)
    throw Error(ErrorCode::kNoDevice, message("the CUDA driver has no function ", name, "; a newer driver is needed"));
  function = reinterpret_cast<Function>(address);
}

Driver fetch_all() {
  Driver functions;
  fetch(functions.tensor_map_encode_tiled, "cuTensorMapEncodeTiled", 12000);
  fetch(functions.get_error_string, "cuGetErrorString", 6000);
  fetch(functions.get_current_context, "cuCtxGetCurrent", 4000);
  fetch(functions.stream_wait_value, "cuStreamWaitValue32", 12000);
  fetch(functions.stream_write_value, "cuStreamWriteValue32", 12000);
  return functions;
}

}  // namespace

const Driver& driver() {
  static const Driver functions = fetch_all();
  return functions;
}

const char* driver_error(CUresult result) {
  const char* text = nullptr;
  driver().get_error_string(result, &text);
  return text ? text : "unknown error";
}

}  // namespace flashmask::cuda
