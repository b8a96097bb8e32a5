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
#pragma GCC visibility pop
