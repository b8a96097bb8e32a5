// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/host/device.h"

#include <cuda_runtime_api.h>

#include "backends/cuda/host/driver.h"
#include "backends/cuda/host/error.h"
#include "common/message.h"

namespace flashmask::cuda {
namespace {

DeviceProperties read_properties(int index) {
  const auto attribute = [index](cudaDeviceAttr which) {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, which, index), "cudaDeviceGetAttribute");
    return value;
  };
  cudaDeviceProp all{};
  check(cudaGetDeviceProperties(&all, index), "cudaGetDeviceProperties");
  return {.name = all.name,
          .major = attribute(cudaDevAttrComputeCapabilityMajor),
          .minor = attribute(cudaDevAttrComputeCapabilityMinor),
          .multiprocessors = attribute(cudaDevAttrMultiProcessorCount),
          .shared_memory_per_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin),
          .memory_bytes = static_cast<int64_t>(all.totalGlobalMem)};
}

std::string why_no_devices(cudaError_t error, const DeviceList& list) {
  if (list.driver == 0) return "no CUDA driver is installed";
  if (error == cudaErrorInsufficientDriver) {
    return message("the CUDA driver is too old: it supports CUDA ", version_text(list.driver),
                   ", this build needs CUDA ", version_text(list.runtime));
  }
  if (error == cudaErrorNoDevice || error == cudaSuccess)
    return "there is no CUDA device (or CUDA_VISIBLE_DEVICES hides it)";
  return message("CUDA cannot be used: ", cudaGetErrorString(error), " (", cudaGetErrorName(error), ")");
}

DeviceList read_devices() {
  DeviceList list;
  list.runtime = CUDART_VERSION;
  if (cudaDriverGetVersion(&list.driver) != cudaSuccess) list.driver = 0;
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) count = 0;
  cudaGetLastError();
  if (count == 0) {
    list.problem = why_no_devices(error, list);
    return list;
  }
  try {
    for (int index = 0; index < count; ++index) list.devices.push_back(read_properties(index));
  } catch (const Error& e) {
    list.devices.clear();
    list.problem = e.what();
  }
  return list;
}

/// True if the thread has a context. A new thread has a device, but gets its context only with the first call of the
/// runtime that needs one, as cudaSetDevice does since CUDA 12. Driver functions, such as the one for tensor maps,
/// make none.
bool has_context() {
  CUcontext context = nullptr;
  return driver().get_current_context(&context) == CUDA_SUCCESS && context;
}

}  // namespace

const DeviceList& device_list() {
  static const DeviceList list = read_devices();
  return list;
}

const DeviceProperties& device(int32_t index) {
  const DeviceList& list = device_list();
  if (!list.problem.empty()) throw Error(ErrorCode::kNoDevice, list.problem);
  if (index < 0 || index >= static_cast<int32_t>(list.devices.size())) {
    throw Error(ErrorCode::kNoDevice,
                message("there is no CUDA device ", index, "; this process sees ", list.devices.size()));
  }
  return list.devices[static_cast<std::size_t>(index)];
}

std::string version_text(int version) { return message(version / 1000, ".", version % 1000 / 10); }

DeviceGuard::DeviceGuard(int32_t index) {
  check(cudaGetDevice(&previous_), "cudaGetDevice");
  if (previous_ == index && has_context()) return;
  check(cudaSetDevice(index), "cudaSetDevice");
  changed_ = previous_ != index;
}

DeviceGuard::~DeviceGuard() {
  if (changed_) cudaSetDevice(previous_);
}

}  // namespace flashmask::cuda
