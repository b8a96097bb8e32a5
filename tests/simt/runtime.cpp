// SPDX-License-Identifier: Apache-2.0
#include "simt/runtime.h"

#include <cuda.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <string_view>
#include <utility>

namespace {

struct EmulatedDevice {
  const char* name;
  int major, minor, multiprocessors, shared_bytes_of_block;
};

constexpr std::array<EmulatedDevice, 3> kDevices{{
    {"NVIDIA A100, emulated", 8, 0, 108, 163 * 1024},
    {"NVIDIA A10, emulated", 8, 6, 72, 99 * 1024},
    {"NVIDIA L4, emulated", 8, 9, 58, 99 * 1024},
}};
constexpr int kSharedBytesUnasked = 48 * 1024;
constexpr std::align_val_t kAlignment{256};

/// The only device of the process, or -1.
int only_device() {
  const char* text = std::getenv("CUDA_VISIBLE_DEVICES");
  return text && *text ? std::atoi(text) : -1;
}
int device_count() { return only_device() >= 0 ? 1 : static_cast<int>(kDevices.size()); }
const EmulatedDevice& device_at(int index) {
  const int only = only_device();
  return kDevices.at(static_cast<std::size_t>(only >= 0 ? only : index));
}

/// As few as a test likes, so that blocks take several work tiles: of all devices, or of each, between commas.
int multiprocessors_of(const EmulatedDevice& d) {
  const char* text = std::getenv("FLASHMASK_SIMT_MULTIPROCESSORS");
  if (!text || !*text) return d.multiprocessors;
  for (auto before = &d - kDevices.data(); before > 0 && std::strchr(text, ','); --before)
    text = std::strchr(text, ',') + 1;
  return std::atoi(text);
}

constinit thread_local int current_device = 0;

/// Dynamic shared memory that kernels may have.
struct Allowed {
  std::mutex mutex;
  std::map<const void*, int> bytes;
};
Allowed& allowed() {
  static Allowed all;
  return all;
}

std::vector<simt::LaunchRecord>& launches() {
  static thread_local std::vector<simt::LaunchRecord> all;
  return all;
}

CUresult current_context(CUcontext* context) {
  static int some;
  *context = reinterpret_cast<CUcontext>(&some);
  return CUDA_SUCCESS;
}
CUresult error_string(CUresult, const char** text) {
  *text = "an error of the emulated driver";
  return CUDA_SUCCESS;
}
CUresult unsupported() { return CUDA_ERROR_NOT_SUPPORTED; }

cudaError_t entry_point(const char* name, void** address, cudaDriverEntryPointQueryResult* found) {
  const std::string_view wanted = name;
  *address = wanted == "cuCtxGetCurrent"    ? reinterpret_cast<void*>(&current_context)
             : wanted == "cuGetErrorString" ? reinterpret_cast<void*>(&error_string)
                                            : reinterpret_cast<void*>(&unsupported);
  if (found) *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

}  // namespace

namespace simt {

cudaError_t allows_launch(const void* kernel, int shared_bytes) {
  const std::lock_guard lock(allowed().mutex);
  const auto own = allowed().bytes.find(kernel);
  const int most = own == allowed().bytes.end() ? kSharedBytesUnasked : std::max(own->second, kSharedBytesUnasked);
  const bool fits = shared_bytes <= most && shared_bytes <= device_at(current_device).shared_bytes_of_block;
  return fits ? cudaSuccess : cudaErrorInvalidValue;
}

void record_launch(const void* kernel, const char* what, const Counts& counts) {
  launches().push_back({kernel, what, counts});
}

std::vector<LaunchRecord> drain_launches() { return std::exchange(launches(), {}); }

}  // namespace simt

extern "C" {

cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "refused by the emulated runtime"; }
const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    case cudaErrorInvalidDevice:
      return "cudaErrorInvalidDevice";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    default:
      return "an error";
  }
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = device_count();
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* index) {
  *index = current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int index) {
  if (index < 0 || index >= device_count()) return cudaErrorInvalidDevice;
  current_device = index;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* all, int index) {
  *all = {};
  all->totalGlobalMem = std::size_t{80} << 30;
  std::snprintf(all->name, sizeof(all->name), "%s", device_at(index).name);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int index) {
  const EmulatedDevice& d = device_at(index);
  switch (which) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = d.major;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = d.minor;
      return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
      *value = multiprocessors_of(d);
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = d.shared_bytes_of_block;
      return cudaSuccess;
    default:
      return cudaErrorInvalidValue;
  }
}
#if CUDART_VERSION >= 12050
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** address, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  return entry_point(name, address, found);
}
#else
cudaError_t cudaGetDriverEntryPoint(const char* name, void** address, unsigned long long,
                                    cudaDriverEntryPointQueryResult* found) {
  return entry_point(name, address, found);
}
#endif

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute which, int value) {
  if (which != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value < 0 || value > device_at(current_device).shared_bytes_of_block) return cudaErrorInvalidValue;
  const std::lock_guard lock(allowed().mutex);
  allowed().bytes[kernel] = value;
  return cudaSuccess;
}

// Memory of exactly the size asked for, so that the address sanitizer sees what is read or written beside it.
cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
  *memory = ::operator new(bytes, kAlignment, std::nothrow);
  return *memory ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaFree(void* memory) {
  ::operator delete(memory, kAlignment);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind) {
  if (bytes > 0) std::memcpy(to, from, bytes);  // whose pointers must not be null
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t) {
  return cudaMemcpy(to, from, bytes, kind);
}
cudaError_t cudaMemset(void* to, int value, std::size_t bytes) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  *stream = nullptr;
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }

// There are no graphs.
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) { return cudaErrorNotSupported; }
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t*) { return cudaErrorNotSupported; }
cudaError_t cudaGraphInstantiate(cudaGraphExec_t*, cudaGraph_t, unsigned long long) { return cudaErrorNotSupported; }
cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) { return cudaErrorNotSupported; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaErrorNotSupported; }
cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaErrorNotSupported; }

}  // extern "C"
