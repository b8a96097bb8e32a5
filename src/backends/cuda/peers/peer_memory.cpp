// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>

#include <cstring>

#include "backends/cuda/host/device.h"
#include "backends/cuda/host/driver.h"
#include "backends/cuda/host/error.h"
#include "call/peers.h"

namespace flashmask::peers {
namespace {

void check_driver(CUresult result, const char* what) {
  if (result != CUDA_SUCCESS)
    throw Error(ErrorCode::kInternal, message("CUDA: ", what, ": ", cuda::driver_error(result)));
}

void enqueue_one(const Transfer& t, cudaStream_t stream) {
  const auto word = reinterpret_cast<CUdeviceptr>(t.to);
  switch (t.kind) {
    case Transfer::Kind::kCopy:
      return cuda::check(cudaMemcpyAsync(t.to, t.from, t.bytes, cudaMemcpyDefault, stream), "copy from a peer");
    case Transfer::Kind::kWait:
      return check_driver(cuda::driver().stream_wait_value(stream, word, t.value, CU_STREAM_WAIT_VALUE_GEQ),
                          "cuStreamWaitValue32 of a peer's flag");
    case Transfer::Kind::kWrite:
      return check_driver(cuda::driver().stream_write_value(stream, word, t.value, CU_STREAM_WRITE_VALUE_DEFAULT),
                          "cuStreamWriteValue32 of the pieces that have arrived");
  }
}

}  // namespace

static_assert(sizeof(cudaIpcMemHandle_t) == sizeof(Handle));

// Memory of cudaMalloc, whatever allocator the caller's tensors come from: a handle of CUDA IPC names no memory of
// pools or of mapped segments.
SharedMemory create(const Device& device, std::size_t bytes) {
  const cuda::DeviceGuard guard(device.index);
  SharedMemory memory{};
  cuda::check(cudaMalloc(&memory.data, bytes), "cudaMalloc of memory for peers");
  try {
    cuda::check(cudaMemset(memory.data, 0, bytes), "cudaMemset of memory for peers");
    cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    cudaIpcMemHandle_t handle;
    cuda::check(cudaIpcGetMemHandle(&handle, memory.data), "cudaIpcGetMemHandle");
    std::memcpy(memory.handle.data(), &handle, sizeof(handle));
  } catch (...) {
    cudaFree(memory.data);
    throw;
  }
  return memory;
}

void* open(const Device& device, const Handle& handle) {
  const cuda::DeviceGuard guard(device.index);
  cudaIpcMemHandle_t named;
  std::memcpy(&named, handle.data(), sizeof(named));
  void* data = nullptr;
  cuda::check(cudaIpcOpenMemHandle(&data, named, cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle");
  return data;
}

void release(const Device& device, void* data, bool is_opened) {
  const cuda::DeviceGuard guard(device.index);
  if (is_opened) return cuda::check(cudaIpcCloseMemHandle(data), "cudaIpcCloseMemHandle");
  cuda::check(cudaFree(data), "cudaFree of memory for peers");
}

void enqueue(std::span<const Transfer> transfers, const Device& device, void* stream) {
  const cuda::DeviceGuard guard(device.index);
  for (const Transfer& transfer : transfers) enqueue_one(transfer, static_cast<cudaStream_t>(stream));
}

}  // namespace flashmask::peers
