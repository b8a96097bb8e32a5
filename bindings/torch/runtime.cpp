// SPDX-License-Identifier: Apache-2.0
#include "runtime.h"

#include <dlfcn.h>

#include <algorithm>
#include <new>
#include <numeric>
#include <stdexcept>
#include <string_view>
#include <utility>

using torch::stable::Tensor;

/// Why the last call of torch's C interface failed. torch has it from 2.13 on, and prints it before: declared weak, it
/// is null there.
extern "C" __attribute__((weak)) const char* torch_exception_get_what_without_backtrace();

namespace {

/// torch's reason for the call that just failed; "" if it printed it instead.
std::string reason() {
  const char* what =
      torch_exception_get_what_without_backtrace ? torch_exception_get_what_without_backtrace() : nullptr;
  return what ? what : "";
}

[[noreturn]] void throw_failure(const std::string& why) {
  throw std::runtime_error("a call of torch's C interface failed" +
                           (why.empty() ? "; torch has logged why" : ": " + why));
}

/// MemoryError in Python, with a text.
class MemoryError : public std::bad_alloc {
 public:
  explicit MemoryError(const std::string& text) : text_(text) {}
  const char* what() const noexcept override { return text_.what(); }

 private:
  std::runtime_error text_;  // copied without throwing
};

}  // namespace

void torch_check(AOTITorchError error) {
  if (error != AOTI_TORCH_SUCCESS) throw_failure(reason());
}

void throw_out_of_memory(const std::string& text, const Place& place) {
  if (place.is_cpu()) throw MemoryError("out of memory: " + text);
  throw std::runtime_error(kOutOfMemory + ("CUDA out of memory: " + text));
}

std::string Place::name() const {
  if (is_cpu()) return "cpu";
  return (type == aoti_torch_device_type_cuda() ? "cuda:" : "another kind of device, number ") + std::to_string(index);
}

Place place_of(const Tensor& tensor) {
  Place place;
  torch_check(aoti_torch_get_device_type(tensor.get(), &place.type));
  torch_check(aoti_torch_get_device_index(tensor.get(), &place.index));
  return place;
}

Place place_of(const torch::stable::Device& device) {
  const auto type = device.is_cpu() ? aoti_torch_device_type_cpu() : aoti_torch_device_type_cuda();
  if (!device.is_cpu() && !device.is_cuda()) throw std::invalid_argument("device must be a CPU or a CUDA device");
  int32_t index = device.index();
  if (device.is_cuda() && index < 0) torch_check(aoti_torch_get_current_device_index(&index));
  return {type, index};
}

int32_t torch_threads() {
  uint32_t threads = 0;
  torch_check(torch_get_num_threads(&threads));
  return static_cast<int32_t>(threads);
}

void* current_stream(const Place& place) {
  using CurrentStream = AOTITorchError (*)(int32_t, void**);
  static const auto look_up = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return reinterpret_cast<CurrentStream>(library ? dlsym(library, "aoti_torch_get_current_cuda_stream") : nullptr);
  }();
  if (!look_up) throw std::runtime_error("the tensors are on " + place.name() + ", but this torch has no CUDA");
  void* stream = nullptr;
  torch_check(look_up(place.index, &stream));
  return stream;
}

int32_t torch_dtype(const Tensor& tensor) {
  int32_t dtype = 0;
  torch_check(aoti_torch_get_dtype(tensor.get(), &dtype));
  return dtype;
}

namespace {

constexpr size_t kMostDimensions = 8;
using Order = std::array<size_t, kMostDimensions>;

Order in_place() {
  Order order{};
  std::iota(order.begin(), order.end(), size_t{0});
  return order;
}

/// True if a failed allocation lacked memory. If torch gives no reason, nothing else is likely.
bool is_out_of_memory(std::string_view why) {
  const auto says = [why](std::string_view words) { return why.find(words) != std::string_view::npos; };
  return why.empty() || says("out of memory") || says("can't allocate memory") || says("not enough memory") ||
         says("bad_alloc");
}

/// The error of the allocation of `name` that just failed.
[[noreturn]] void throw_no_tensor(const char* name, const int64_t* shape, size_t rank, int32_t dtype,
                                  const Place& place) {
  const std::string why = reason();
  if (!is_out_of_memory(why)) throw_failure(why);
  std::string sizes;
  size_t bytes = aoti_torch_dtype_element_size(dtype);
  for (size_t d = 0; d < rank; ++d) {
    sizes += (d ? ", " : "") + std::to_string(shape[d]);
    bytes *= static_cast<size_t>(shape[d]);
  }
  throw_out_of_memory(std::string(name) + " [" + sizes + "] needs " + std::to_string(bytes) + " bytes on " +
                          place.name() + "; free memory there or pass less at once (a smaller batch, fewer tokens)",
                      place);
}

/// An uninitialised dense tensor, its dimensions in memory as `order` has them, the innermost one last.
Tensor empty_in_order(const char* name, const int64_t* shape, size_t rank, const Order& order, int32_t dtype,
                      const Place& place) {
  std::array<int64_t, kMostDimensions> strides{};
  int64_t stride = 1;
  for (size_t n = rank; n-- > 0; stride *= std::max<int64_t>(shape[order[n]], 1)) strides[order[n]] = stride;
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_empty_strided(static_cast<int64_t>(rank), shape, strides.data(), dtype, place.type, place.index,
                               &handle) != AOTI_TORCH_SUCCESS)
    throw_no_tensor(name, shape, rank, dtype, place);
  return Tensor(handle);
}

void check_rank(size_t rank) {
  if (rank > kMostDimensions) throw std::invalid_argument("a tensor has more than 8 dimensions");
}

}  // namespace

Tensor empty(const char* name, const int64_t* shape, size_t rank, int32_t dtype, const Place& place) {
  check_rank(rank);
  return empty_in_order(name, shape, rank, in_place(), dtype, place);
}

Tensor empty_like(const char* name, const Tensor& tensor, int32_t dtype, const Place& place) {
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  check_rank(sizes.size());
  Order order = in_place();
  const auto outer = static_cast<std::ptrdiff_t>(std::max<size_t>(sizes.size(), 1)) - 1;
  std::stable_sort(order.begin(), order.begin() + outer, [&](size_t a, size_t b) { return strides[a] > strides[b]; });
  return empty_in_order(name, sizes.data(), sizes.size(), order, dtype, place);
}

Tensor copy_of(const char* name, const Tensor& tensor, const Place& place) {
  const auto sizes = tensor.sizes();
  const Tensor copy = empty(name, sizes.data(), sizes.size(), torch_dtype(tensor), place);
  torch_check(aoti_torch_copy_(copy.get(), tensor.get(), 0));
  return copy;
}

Tensor empty_bytes(const char* name, size_t bytes, const Place& place) {
  return empty<1>(name, {static_cast<int64_t>(bytes)}, aoti_torch_dtype_uint8(), place);
}
