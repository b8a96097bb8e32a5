// SPDX-License-Identifier: Apache-2.0
#include "runtime.h"

#include <dlfcn.h>

#include <algorithm>
#include <numeric>
#include <stdexcept>

using torch::stable::Tensor;

void torch_check(AOTITorchError error) {
  if (error != AOTI_TORCH_SUCCESS) throw std::runtime_error("a call of torch's C interface failed; torch has printed why");
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

/// An uninitialised dense tensor, its dimensions in memory as `order` has them, the innermost one last.
Tensor empty_in_order(const int64_t* shape, size_t rank, const Order& order, int32_t dtype, const Place& place) {
  std::array<int64_t, kMostDimensions> strides{};
  int64_t stride = 1;
  for (size_t n = rank; n-- > 0; stride *= std::max<int64_t>(shape[order[n]], 1)) strides[order[n]] = stride;
  AtenTensorHandle handle = nullptr;
  torch_check(aoti_torch_empty_strided(static_cast<int64_t>(rank), shape, strides.data(), dtype, place.type, place.index, &handle));
  return Tensor(handle);
}

void check_rank(size_t rank) {
  if (rank > kMostDimensions) throw std::invalid_argument("a tensor has more than 8 dimensions");
}

}  // namespace

Tensor empty(const int64_t* shape, size_t rank, int32_t dtype, const Place& place) {
  check_rank(rank);
  return empty_in_order(shape, rank, in_place(), dtype, place);
}

Tensor empty_like(const Tensor& tensor, const Place& place) {
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  check_rank(sizes.size());
  Order order = in_place();
  const auto outer = static_cast<std::ptrdiff_t>(std::max<size_t>(sizes.size(), 1)) - 1;
  std::stable_sort(order.begin(), order.begin() + outer, [&](size_t a, size_t b) { return strides[a] > strides[b]; });
  return empty_in_order(sizes.data(), sizes.size(), order, torch_dtype(tensor), place);
}

Tensor copy_of(const Tensor& tensor, const Place& place) {
  const auto sizes = tensor.sizes();
  const Tensor copy = empty(sizes.data(), sizes.size(), torch_dtype(tensor), place);
  torch_check(aoti_torch_copy_(copy.get(), tensor.get(), 0));
  return copy;
}

Tensor empty_bytes(size_t bytes, const Place& place) { return empty<1>({static_cast<int64_t>(bytes)}, aoti_torch_dtype_uint8(), place); }
