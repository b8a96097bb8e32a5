// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>
#include <string_view>

#include "flashmask/data_type.h"
#include "flashmask/export.h"

namespace flashmask {

/// Bytes per element; 0 for kNone.
FLASHMASK_API std::size_t element_size(DataType dtype);
/// "float32", "bfloat16", ...
FLASHMASK_API std::string_view name(DataType dtype);

/// The device that holds a tensor.
struct Device {
  enum class Kind : int32_t { kCpu = 0, kCuda = 1 };
  Kind kind = Kind::kCpu;
  int32_t index = 0;
  bool operator==(const Device&) const = default;
};

/// A non-owning view of a strided tensor of at most five dimensions.
///
/// `stride` counts elements, not bytes. A default-constructed view is an absent tensor
/// (`defined()` is false); a tensor with a zero dimension is present and may have a null `data`.
struct TensorView {
  static constexpr int kMaxRank = 5;

  void* data = nullptr;
  DataType dtype = DataType::kNone;
  int32_t rank = 0;
  std::array<int64_t, kMaxRank> shape{};
  std::array<int64_t, kMaxRank> stride{};
  Device device{};

  bool defined() const { return dtype != DataType::kNone; }
  /// The number of elements, at most INT64_MAX; 0 if a size is 0 or less.
  int64_t num_elements() const {
    int64_t n = 1;
    for (int d = 0; d < rank; ++d) {
      if (shape[d] <= 0) return 0;
      n = n > std::numeric_limits<int64_t>::max() / shape[d] ? std::numeric_limits<int64_t>::max() : n * shape[d];
    }
    return n;
  }

  /// A row-major view of `data`; `data` is only written through when the view is passed as an output.
  static TensorView contiguous(const void* data, DataType dtype, std::initializer_list<int64_t> shape) {
    TensorView t;
    t.data = const_cast<void*>(data);
    t.dtype = dtype;
    t.rank = static_cast<int32_t>(shape.size());
    int d = 0;
    for (int64_t n : shape) t.shape[d++] = n;
    int64_t stride = 1;
    for (d = t.rank - 1; d >= 0; --d) {
      t.stride[d] = stride;
      stride *= t.shape[d] > 0 ? t.shape[d] : 1;
    }
    return t;
  }
};

/// "float32 [2, 128, 8, 64]", for messages; "absent" for an undefined view.
FLASHMASK_API std::string describe(const TensorView& tensor);

}  // namespace flashmask
