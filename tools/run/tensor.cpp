// SPDX-License-Identifier: Apache-2.0
#include "run/tensor.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <thread>
#include <utility>

namespace flashmask::run {
namespace {

constexpr std::align_val_t kAlignment{64};

}  // namespace

void Tensor::Free::operator()(std::byte* data) const { ::operator delete(data, kAlignment); }

Tensor::Tensor(DataType dtype, std::vector<int64_t> shape) : dtype_(dtype), shape_(std::move(shape)) {
  for (const int64_t n : shape_) size_ *= n;
  for (std::size_t d = 1; d < shape_.size(); ++d) stride_ *= shape_[d];
  data_.reset(
      static_cast<std::byte*>(::operator new(static_cast<std::size_t>(size_) * element_size(dtype_), kAlignment)));
}

TensorView Tensor::view(int64_t count) const {
  TensorView view;
  view.data = data_.get();
  view.dtype = dtype_;
  view.rank = static_cast<int32_t>(shape_.size());
  int64_t stride = 1;
  for (std::size_t d = shape_.size(); d-- > 0;) {
    view.shape[d] = d == 0 ? count : shape_[d];
    view.stride[d] = stride;
    stride *= shape_[d];
  }
  return view;
}

void Tensor::poison() {
  // All bits set is a NaN in each of the three types.
  std::memset(data_.get(), 0xff, static_cast<std::size_t>(size_) * element_size(dtype_));
}

void parallel_for(int64_t count, int threads, const std::function<void(int64_t, int64_t)>& f) {
  const int64_t wanted = threads > 0 ? threads : std::max(1u, std::thread::hardware_concurrency());
  const int64_t parts = std::clamp<int64_t>(wanted, 1, std::max<int64_t>(count, 1));
  std::vector<std::jthread> workers;
  for (int64_t part = 1; part < parts; ++part) {
    workers.emplace_back([&, part] { f(count * part / parts, count * (part + 1) / parts); });
  }
  f(0, count / parts);
}

}  // namespace flashmask::run
