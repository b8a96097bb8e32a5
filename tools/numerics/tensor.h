// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <new>
#include <span>
#include <vector>

#include "flashmask/tensor.h"
#include "numerics/number.h"

namespace flashmask::numerics {

/// Memory layout of a tensor.
enum class Layout {
  kBshd,     ///< [batch, seqlen, heads, dim], contiguous
  kBhsd,     ///< [batch, heads, seqlen, dim] in memory, seen as [batch, seqlen, heads, dim]
  kPadded,   ///< as kBshd with gaps after every row, sequence position and batch entry
  kAligned,  ///< as kPadded with gaps of multiples of 8 elements, so that 16-bit rows keep the 16-byte alignment that
             ///< CUDA needs
};

/// One value per (batch entry, head, row, column), in that order: how results are compared, whatever their
/// layout and dtype were.
struct HeadArray {
  int64_t batch = 0, heads = 0, rows = 0, columns = 0;
  std::vector<double> values;

  HeadArray() = default;
  HeadArray(int64_t b, int64_t h, int64_t r, int64_t c)
      : batch(b), heads(h), rows(r), columns(c), values(static_cast<std::size_t>(b * h * r * c)) {}
  int64_t head_size() const { return rows * columns; }
  std::span<double> head(int64_t b, int64_t h) {
    return {values.data() + (b * heads + h) * head_size(), static_cast<std::size_t>(head_size())};
  }
  std::span<const double> head(int64_t b, int64_t h) const {
    return {values.data() + (b * heads + h) * head_size(), static_cast<std::size_t>(head_size())};
  }
  /// Views it as a float64 tensor [batch, rows, heads, columns].
  TensorView as_tensor();
  /// Views it as a float64 tensor [batch, heads, rows]; columns must be 1.
  TensorView as_lse();
  /// Views it as a float64 tensor [heads]; batch, rows and columns must be 1.
  TensorView as_vector();
};

/// Allocates on boundaries of 64 bytes.
template <typename T>
struct AlignedAllocator {
  using value_type = T;
  T* allocate(std::size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), kAlignment)); }
  void deallocate(T* data, std::size_t) { ::operator delete(data, kAlignment); }
  bool operator==(const AlignedAllocator&) const = default;

  static constexpr std::align_val_t kAlignment{64};
};

/// Memory that is all 0xff bytes (NaN in every floating-point type) until it is written to, with room around it to show
/// writes out of bounds. Aligned for SIMD.
class PoisonedBytes {
 public:
  /// `offset` bytes are skipped in front, to misalign the rest.
  explicit PoisonedBytes(std::size_t size, std::size_t offset = 0);
  std::span<std::byte> bytes() { return {storage_.data() + kGuard + offset_, size_}; }
  std::size_t size() const { return size_; }
  const std::byte* data() const { return storage_.data() + kGuard + offset_; }
  /// bytes() and the room around them, and where they begin in it.
  std::span<std::byte> storage() { return storage_; }
  std::span<const std::byte> storage() const { return storage_; }
  std::size_t begin() const { return kGuard + offset_; }
  /// Makes bytes() poison again.
  void poison();
  /// True if nothing was written outside of bytes().
  bool guards_intact() const;

  static constexpr std::byte kPoison{0xff};

 private:
  static constexpr std::size_t kGuard = 256;
  std::size_t size_, offset_;
  std::vector<std::byte, AlignedAllocator<std::byte>> storage_;
};

/// A tensor with its memory. Fresh ones hold poison.
class Tensor {
 public:
  Tensor(Tensor&&) = default;
  Tensor& operator=(Tensor&&) = default;
  Tensor(const Tensor&) = delete;  // the view points into the memory
  Tensor& operator=(const Tensor&) = delete;

  /// [batch, seqlen, heads, dim]
  static Tensor attention(DataType dtype, Layout layout, int64_t batch, int64_t seqlen, int64_t heads, int64_t dim);
  /// [batch, heads, seqlen]
  static Tensor lse(DataType dtype, Layout layout, int64_t batch, int64_t heads, int64_t seqlen);
  /// Any shape, elements in order.
  static Tensor contiguous(DataType dtype, const std::vector<int64_t>& shape);
  /// [batch, seqlen, heads, dim], one number seen everywhere.
  static Tensor expanded(DataType dtype, int64_t batch, int64_t seqlen, int64_t heads, int64_t dim);

  const TensorView& view() const { return view_; }
  /// The first `count` entries of the first dimension.
  TensorView view(int64_t count) const;
  /// The bytes of the first `count` entries.
  std::span<const std::byte> bytes(int64_t count) const;

  /// The element at an offset in elements, as the strides count them.
  double at(int64_t offset) const { return load(view_.dtype, view_.data, offset); }
  void set(int64_t offset, double value) { store(view_.dtype, view_.data, offset, value); }
  /// Number of elements, and elements from one entry of the first dimension to the next.
  int64_t size() const { return view_.num_elements(); }
  int64_t stride() const { return view_.stride[0]; }
  /// Every element becomes NaN again: one that a call forgets to write is then found.
  void poison() { memory_.poison(); }

  /// Sets every element to a value from `draw`, rounded to the dtype.
  void fill(const std::function<double()>& draw);
  HeadArray values() const;
  /// The elements, the gaps between them and the room around them, and where the first element is in it.
  std::span<std::byte> storage() { return memory_.storage(); }
  std::span<const std::byte> storage() const { return memory_.storage(); }
  std::size_t first_byte() const { return memory_.begin(); }
  /// True if the gaps between rows and the memory around the tensor still hold their poison.
  bool gaps_intact() const;

 private:
  Tensor(DataType dtype, std::vector<int64_t> shape, std::vector<int64_t> strides, int64_t elements);
  /// Calls f(offset) for every element, in the order [batch, head, row, column].
  template <typename F>
  void for_each_offset(F&& f) const;

  PoisonedBytes memory_;
  TensorView view_;
};

}  // namespace flashmask::numerics
