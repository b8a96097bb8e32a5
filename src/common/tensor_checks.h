// SPDX-License-Identifier: Apache-2.0
#pragma once

// Checks of every tensor before anything of it is read.

#include <cstdint>

#include "common/arithmetic.h"
#include "common/message.h"
#include "flashmask/tensor.h"

namespace flashmask {

/// Throws kInvalidArgument, naming the argument, unless sizes are at least 0 and neither their product (a 0 counting as
/// 1) nor the span of the strides is more than 2^63 bytes: so no count of elements and no offset overflows.
inline void check_extent(const char* argument, const TensorView& t) {
  constexpr int64_t kElement = 8;  // the largest there is
  int64_t bytes = kElement, span = kElement;
  bool fits = true, empty = false;
  for (int d = 0; d < t.rank; ++d) {
    const int64_t size = t.shape[static_cast<std::size_t>(d)];
    if (size < 0) throw_invalid(argument, " is ", describe(t), "; sizes must be at least 0");
    empty |= size == 0;
    fits = fits && !__builtin_mul_overflow(bytes, size > 0 ? size : 1, &bytes);
  }
  if (!fits) throw_invalid(argument, " is ", describe(t), "; it has more than 2^63 bytes");
  for (int d = 0; d < t.rank && !empty; ++d) {
    const int64_t stride = t.stride[static_cast<std::size_t>(d)];
    int64_t reach = 0;
    // Negates the element size for a negative stride, whose absolute value may not exist, and so adds 0 or more.
    fits = fits && !__builtin_mul_overflow(t.shape[static_cast<std::size_t>(d)] - 1, stride, &reach) &&
           !__builtin_mul_overflow(reach, stride < 0 ? -kElement : kElement, &reach) &&
           !__builtin_add_overflow(span, reach, &span);
  }
  if (!fits) throw_invalid(argument, " is ", describe(t), "; with its strides it spans more than 2^63 bytes");
}

/// Throws kInvalidArgument, naming the argument, if there are elements and the data pointer is null or not aligned to
/// their size.
inline void check_data(const char* argument, const TensorView& t) {
  if (t.num_elements() == 0) return;
  if (!t.data) throw_invalid(argument, " has no data: it is ", describe(t), " and its pointer is null");
  const std::size_t size = element_size(t.dtype);
  if (reinterpret_cast<std::uintptr_t>(t.data) % size != 0)
    throw_invalid("the address of ", argument, " is not a multiple of ", size, " bytes");
}

}  // namespace flashmask
