// SPDX-License-Identifier: Apache-2.0
//
// Handlers of XLA's foreign-function interface for flashmask.jax, over the C interface, which checks the arguments;
// here buffers become fm_tensor, and a status becomes an error. Needs only JAX's headers, none of CUDA's or Python's.
#pragma once

#include <xla/ffi/api/ffi.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include "flashmask/c_api.h"

namespace ffi = xla::ffi;

inline int32_t dtype_of(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::DataType::F32:
      return FM_FLOAT32;
    case ffi::DataType::F64:
      return FM_FLOAT64;
    case ffi::DataType::BF16:
      return FM_BFLOAT16;
    case ffi::DataType::F16:
      return FM_FLOAT16;
    case ffi::DataType::S32:
      return FM_INT32;
    case ffi::DataType::S64:
      return FM_INT64;
    case ffi::DataType::PRED:
      return FM_BOOL;
    case ffi::DataType::U8:
      return FM_UINT8;
    case ffi::DataType::F8E4M3FN:
      return FM_FLOAT8_E4M3;
    default:
      return -1;  // none: the C interface says so
  }
}

/// XLA's buffers are dense, the last dimension innermost.
inline fm_tensor tensor_of(const ffi::AnyBuffer& buffer) {
  fm_tensor tensor{};
  tensor.data = buffer.untyped_data();
  tensor.dtype = dtype_of(buffer.element_type());
  const auto sizes = buffer.dimensions();
  tensor.ndim = static_cast<int32_t>(sizes.size());
  int64_t stride = 1;
  for (size_t d = std::min<size_t>(sizes.size(), 5); d-- > 0; stride *= std::max<int64_t>(sizes[d], 1)) {
    tensor.shape[d] = sizes[d];
    tensor.stride[d] = stride;
  }
  return tensor;
}

inline ffi::Error error_of(fm_status status) {
  switch (status) {
    case FM_OK:
      return ffi::Error::Success();
    case FM_INVALID_ARGUMENT:
    case FM_UNREPRESENTABLE:
      return ffi::Error::InvalidArgument(fm_last_error());
    case FM_UNSUPPORTED:
      return {ffi::ErrorCode::kUnimplemented, fm_last_error()};
    case FM_NO_DEVICE:
      return {ffi::ErrorCode::kNotFound, fm_last_error()};
    case FM_OUT_OF_MEMORY:
      return {ffi::ErrorCode::kResourceExhausted, fm_last_error()};
    default:
      return ffi::Error::Internal(fm_last_error());
  }
}

using HostMemory = std::unique_ptr<std::byte[]>;

/// fm_options::allocate; `context` is a HostMemory.
inline void* allocate(void* context, size_t bytes) {
  auto& memory = *static_cast<HostMemory*>(context);
  memory.reset(new (std::nothrow) std::byte[bytes]);
  return memory.get();
}

/// Device of a call, and its workspace: on the host memory that lasts as long as the call, on CUDA a buffer of XLA's,
/// which a command buffer keeps to run the work again later.
struct Place {
  int32_t device = FM_DEVICE_CPU;
  void* stream = nullptr;
  void* workspace = nullptr;
  size_t workspace_bytes = 0;
};

/// On CUDA, where the last result is the workspace.
inline ffi::ErrorOr<Place> place_on_cuda(int32_t ordinal, void* stream, const ffi::RemainingRets& results) {
  if (results.size() == 0) return ffi::Unexpected(ffi::Error::Internal("the call has no workspace"));
  auto workspace = results.get<ffi::AnyBuffer>(results.size() - 1);
  if (!workspace) return ffi::Unexpected(workspace.error());
  return Place{1 + ordinal, stream, (*workspace)->untyped_data(), (*workspace)->size_bytes()};
}

/// Runs a call of the C interface at a place, with the options that are not of places.
template <typename Args>
ffi::Error run_at(const Place& place, fm_status (*function)(const Args*, void*, size_t, const fm_options*),
                  const Args& args, fm_options options) {
  HostMemory memory;
  options.struct_size = sizeof(options);
  options.device = place.device;
  options.stream = place.stream;
  if (place.device == FM_DEVICE_CPU) {
    options.allocate = allocate;
    options.allocate_context = &memory;
  }
  return error_of(function(&args, place.workspace, place.workspace_bytes, &options));
}

/// Names, a comma after each.
inline std::vector<std::string> split(std::string_view names) {
  std::vector<std::string> all;
  for (size_t end; (end = names.find(',')) != names.npos; names.remove_prefix(end + 1))
    all.emplace_back(names.substr(0, end));
  return all;
}

// Exported symbols; all others are hidden.
#pragma GCC visibility push(default)
XLA_FFI_DECLARE_HANDLER_SYMBOL(flashmask_forward_cpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(flashmask_forward_cuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(flashmask_backward_cpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(flashmask_backward_cuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(flashmask_build_plan_cpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(flashmask_build_plan_cuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(flashmask_build_mask_cpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(flashmask_build_mask_cuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(flashmask_cached_forward_cpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(flashmask_cached_forward_cuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(flashmask_append_kv_cpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(flashmask_append_kv_cuda);
#pragma GCC visibility pop
