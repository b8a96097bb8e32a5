// SPDX-License-Identifier: Apache-2.0
#include "numerics/tensor.h"

#include <algorithm>
#include <utility>

namespace flashmask::numerics {
namespace {

/// Elements left free after rows, sequence positions and batch entries.
struct Gaps {
  int64_t row = 0, position = 0, batch = 0;
};

Gaps gaps_of(Layout layout) {
  if (layout == Layout::kPadded) return {3, 5, 7};  // odd: no alignment beyond the element's own
  if (layout == Layout::kAligned) return {8, 16, 24};
  return {};
}

TensorView make_view(DataType dtype, const std::vector<int64_t>& shape, const std::vector<int64_t>& strides) {
  TensorView view;
  view.dtype = dtype;
  view.rank = static_cast<int32_t>(shape.size());
  std::copy(shape.begin(), shape.end(), view.shape.begin());
  std::copy(strides.begin(), strides.end(), view.stride.begin());
  return view;
}

TensorView view_of(HeadArray& array, const std::vector<int64_t>& shape, const std::vector<int64_t>& strides) {
  TensorView view = make_view(DataType::kFloat64, shape, strides);
  view.data = array.values.data();
  return view;
}

}  // namespace

TensorView HeadArray::as_tensor() {
  return view_of(*this, {batch, rows, heads, columns}, {heads * rows * columns, columns, rows * columns, 1});
}

TensorView HeadArray::as_lse() { return view_of(*this, {batch, heads, rows}, {heads * rows, rows, 1}); }

TensorView HeadArray::as_vector() { return view_of(*this, {heads}, {1}); }

PoisonedBytes::PoisonedBytes(std::size_t size, std::size_t offset)
    : size_(size), offset_(offset), storage_(size + offset + 2 * kGuard, kPoison) {}

void PoisonedBytes::poison() { std::ranges::fill(bytes(), kPoison); }

bool PoisonedBytes::guards_intact() const {
  const auto poisoned = [](std::byte byte) { return byte == kPoison; };
  const auto begin = storage_.begin() + static_cast<std::ptrdiff_t>(kGuard + offset_);
  return std::all_of(storage_.begin(), begin, poisoned) &&
         std::all_of(begin + static_cast<std::ptrdiff_t>(size_), storage_.end(), poisoned);
}

Tensor::Tensor(DataType dtype, std::vector<int64_t> shape, std::vector<int64_t> strides, int64_t elements)
    : memory_(static_cast<std::size_t>(elements) * element_size(dtype)), view_(make_view(dtype, shape, strides)) {
  view_.data = memory_.bytes().data();
}

Tensor Tensor::attention(DataType dtype, Layout layout, int64_t batch, int64_t seqlen, int64_t heads, int64_t dim) {
  const std::vector<int64_t> shape{batch, seqlen, heads, dim};
  if (layout == Layout::kBhsd)
    return {dtype, shape, {heads * seqlen * dim, dim, seqlen * dim, 1}, batch * heads * seqlen * dim};
  const Gaps gaps = gaps_of(layout);
  const int64_t row = dim + gaps.row;
  const int64_t position = heads * row + gaps.position;
  const int64_t entry = seqlen * position + gaps.batch;
  return {dtype, shape, {entry, position, row, 1}, batch * entry};
}

Tensor Tensor::lse(DataType dtype, Layout layout, int64_t batch, int64_t heads, int64_t seqlen) {
  const Gaps gaps = gaps_of(layout);
  const int64_t row = seqlen + gaps.row;
  const int64_t entry = heads * row + gaps.batch;
  return {dtype, {batch, heads, seqlen}, {entry, row, 1}, batch * entry};
}

Tensor Tensor::contiguous(DataType dtype, const std::vector<int64_t>& shape) {
  std::vector<int64_t> strides(shape.size());
  int64_t elements = 1;
  for (std::size_t d = shape.size(); d-- > 0; elements *= shape[d]) strides[d] = elements;
  return {dtype, shape, strides, elements};
}

Tensor Tensor::expanded(DataType dtype, int64_t batch, int64_t seqlen, int64_t heads, int64_t dim) {
  return {dtype, {batch, seqlen, heads, dim}, {0, 0, 0, 0}, 1};
}

template <typename F>
void Tensor::for_each_offset(F&& f) const {
  const auto& n = view_.shape;
  const auto& s = view_.stride;
  if (view_.rank == 1) {
    for (int64_t h = 0; h < n[0]; ++h) f(h * s[0]);
    return;
  }
  if (view_.rank == 2) {
    for (int64_t b = 0; b < n[0]; ++b) {
      for (int64_t h = 0; h < n[1]; ++h) f(b * s[0] + h * s[1]);
    }
    return;
  }
  if (view_.rank == 3) {
    for (int64_t b = 0; b < n[0]; ++b) {
      for (int64_t h = 0; h < n[1]; ++h) {
        for (int64_t i = 0; i < n[2]; ++i) f(b * s[0] + h * s[1] + i * s[2]);
      }
    }
    return;
  }
  for (int64_t b = 0; b < n[0]; ++b) {
    for (int64_t h = 0; h < n[2]; ++h) {
      for (int64_t i = 0; i < n[1]; ++i) {
        for (int64_t d = 0; d < n[3]; ++d) f(b * s[0] + i * s[1] + h * s[2] + d * s[3]);
      }
    }
  }
}

TensorView Tensor::view(int64_t count) const {
  TensorView view = view_;
  view.shape[0] = count;
  return view;
}

std::span<const std::byte> Tensor::bytes(int64_t count) const {
  return {memory_.data(), static_cast<std::size_t>(count * stride()) * element_size(view_.dtype)};
}

void Tensor::fill(const std::function<double()>& draw) {
  const bool one_number = view_.stride[0] == 0 && view_.num_elements() > 0;
  if (one_number) {
    store(view_.dtype, view_.data, 0, draw());
    return;
  }
  for_each_offset([&](int64_t offset) { store(view_.dtype, view_.data, offset, draw()); });
}

HeadArray Tensor::values() const {
  const auto& n = view_.shape;
  HeadArray array = view_.rank == 1   ? HeadArray(1, n[0], 1, 1)
                    : view_.rank == 3 ? HeadArray(n[0], n[1], n[2], 1)
                                      : HeadArray(n[0], n[2], n[1], n[3]);
  std::size_t at = 0;
  for_each_offset([&](int64_t offset) { array.values[at++] = load(view_.dtype, view_.data, offset); });
  return array;
}

bool Tensor::gaps_intact() const {
  if (!memory_.guards_intact()) return false;
  const std::size_t size = element_size(view_.dtype);
  std::vector<bool> is_element(memory_.size() / size);
  for_each_offset([&](int64_t offset) { is_element[static_cast<std::size_t>(offset)] = true; });
  for (std::size_t byte = 0; byte < memory_.size(); ++byte) {
    if (!is_element[byte / size] && memory_.data()[byte] != PoisonedBytes::kPoison) return false;
  }
  return true;
}

}  // namespace flashmask::numerics
