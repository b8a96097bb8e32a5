// SPDX-License-Identifier: Apache-2.0
#pragma once

// A call of the C interface with torch's tensors: tensors as fm_tensor, options, workspace, and statuses as exceptions.

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string>

#include "flashmask/c_api.h"
#include "runtime.h"

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

/// Prefixes that Python turns into the package's own exceptions: torch passes on an exception's text, not its type.
inline constexpr const char* kUnsupported = "UnsupportedError: ";
inline constexpr const char* kUnrepresentable = "UnrepresentableMaskError: ";

inline void check(fm_status status, const Place& place) {
  switch (status) {
    case FM_OK:
      return;
    case FM_INVALID_ARGUMENT:
      throw std::invalid_argument(fm_last_error());  // ValueError in Python
    case FM_UNREPRESENTABLE:
      throw std::runtime_error(std::string(kUnrepresentable) + fm_last_error());
    case FM_UNSUPPORTED:
      throw std::runtime_error(std::string(kUnsupported) + fm_last_error());
    case FM_OUT_OF_MEMORY:
      throw_out_of_memory(fm_last_error(), place);
    default:
      throw std::runtime_error(fm_last_error());
  }
}

inline fm_dtype dtype_of(const Tensor& tensor, const char* argument) {
  const int32_t dtype = torch_dtype(tensor);
  if (dtype == aoti_torch_dtype_float32()) return FM_FLOAT32;
  if (dtype == aoti_torch_dtype_bfloat16()) return FM_BFLOAT16;
  if (dtype == aoti_torch_dtype_float16()) return FM_FLOAT16;
  if (dtype == aoti_torch_dtype_float64()) return FM_FLOAT64;
  if (dtype == aoti_torch_dtype_int32()) return FM_INT32;
  if (dtype == aoti_torch_dtype_bool()) return FM_BOOL;
  if (dtype == aoti_torch_dtype_uint8()) return FM_UINT8;
  if (dtype == aoti_torch_dtype_float8_e4m3fn()) return FM_FLOAT8_E4M3;
  throw std::invalid_argument(
      std::string(argument) +
      " has a dtype that is not float32, bfloat16, float16, float64, float8_e4m3fn, int32, bool or uint8");
}

/// The tensors of one call, which must all be in one place.
class Call {
 public:
  Call(Place place, const char* reference) : place_(place), reference_(reference) {}

  void check_place(const Tensor& tensor, const char* argument) const {
    if (const Place place = place_of(tensor); place != place_)
      throw std::invalid_argument(std::string(argument) + " is on " + place.name() + " and " + reference_ + " on " +
                                  place_.name() + "; all tensors of a call must be on one device");
  }
  fm_tensor operator()(const Tensor& tensor, const char* argument) const {
    return describe(tensor, argument, dtype_of(tensor, argument));
  }
  fm_tensor operator()(const OptionalTensor& tensor, const char* argument) const {
    return tensor ? (*this)(*tensor, argument) : fm_tensor{};
  }
  fm_tensor describe(const Tensor& tensor, const char* argument, fm_dtype dtype) const {
    check_place(tensor, argument);
    fm_tensor result{};
    result.dtype = dtype;
    result.ndim = static_cast<int32_t>(tensor.dim());
    if (result.ndim > 5)
      throw std::invalid_argument(std::string(argument) + " has " + std::to_string(result.ndim) +
                                  " dimensions; at most 5 are accepted");
    result.data = tensor.data_ptr();
    const auto sizes = tensor.sizes(), strides = tensor.strides();
    for (size_t d = 0; d < sizes.size(); ++d) {
      result.shape[d] = sizes[d];
      result.stride[d] = strides[d];
    }
    return result;
  }

 private:
  Place place_;
  const char* reference_;
};

inline fm_options options_for(Place place) {
  fm_options options{};
  options.struct_size = sizeof(options);
  options.device = place.fm_device();
  if (place.is_cpu())
    options.threads = torch_threads();
  else
    options.stream = current_stream(place);
  return options;
}

/// A call's workspace, from torch's allocator when the call asks for it, until the call returns: torch gives the memory
/// to nothing that does not wait for the call's work.
class Workspace {
 public:
  Workspace(const char* name, const Place& place) : name_(name), place_(place) {}

  /// fm_options::allocate, which must not throw.
  static void* allocate(void* context, size_t bytes) noexcept {
    auto* self = static_cast<Workspace*>(context);
    try {
      self->memory_ = empty_bytes(self->name_, bytes, self->place_);
      return self->memory_->data_ptr();
    } catch (...) {
      self->error_ = std::current_exception();
      return nullptr;
    }
  }
  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  const char* name_;
  const Place& place_;
  OptionalTensor memory_;
  std::exception_ptr error_;
};

template <typename Function, typename Args>
void run(const Function& function, const char* name_of_workspace, const Args& args, fm_options options,
         const Place& place) {
  Workspace workspace(name_of_workspace, place);
  options.allocate = Workspace::allocate;
  options.allocate_context = &workspace;
  const fm_status status = function(&args, nullptr, 0, &options);
  workspace.rethrow();
  check(status, place);
}
