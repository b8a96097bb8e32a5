// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "flashmask/tensor.h"

// Inlined: calls would cost more than the steps themselves.
#if defined(__CUDACC__)
#define FLASHMASK_COLUMN __host__ __device__ __forceinline__
#else
#define FLASHMASK_COLUMN [[gnu::always_inline]] inline
#endif

#if defined(__CUDA_ARCH__)
#define FLASHMASK_UNROLL _Pragma("unroll")
#else
#define FLASHMASK_UNROLL
#endif

namespace flashmask::build {

/// Adds 1, atomically on a device, as entries may run at once.
FLASHMASK_COLUMN void add_one(int32_t* to) {
#if defined(__CUDA_ARCH__)
  atomicAdd(to, 1);
#else
  ++*to;
#endif
}

/// A batch entry and head of the mask that is built.
struct Lead {
  int64_t index = 0;  ///< batch * heads + head
  int64_t batch = 0, head = 0;
};

/// How many of them there are.
struct Leads {
  int64_t batch = 1, heads = 1;
  FLASHMASK_COLUMN int64_t count() const { return batch * heads; }
  FLASHMASK_COLUMN Lead operator[](int64_t n) const {
    const uint32_t at = static_cast<uint32_t>(n), each = static_cast<uint32_t>(heads);  // 64 bits are slow to divide
    return {n, at / each, at % each};
  }
};

/// Integers of one parameter, [batch, heads, count], in host or device memory; a stride of 0 broadcasts. Without data
/// all are `constant`.
struct Integers {
  const void* data = nullptr;
  DataType dtype = DataType::kInt32;  ///< kInt32 or kInt64; of flags also kBool and kUInt8
  int64_t count = 0;
  int64_t batch_stride = 0, head_stride = 0, stride = 1;
  int64_t constant = 0;

  /// The integers from the n-th on.
  Integers from(int64_t n) const {
    Integers rest = *this;
    if (data) rest.data = static_cast<const char*>(data) + n * stride * static_cast<int64_t>(element_size(dtype));
    rest.count -= n;
    return rest;
  }
  FLASHMASK_COLUMN int64_t operator()(const Lead& lead, int64_t n) const {
    if (!data) return constant;
    const int64_t at = lead.batch * batch_stride + lead.head * head_stride + n * stride;
    switch (dtype) {
      case DataType::kInt32:
        return static_cast<const int32_t*>(data)[at];
      case DataType::kInt64:
        return static_cast<const int64_t*>(data)[at];
      default:
        return static_cast<const uint8_t*>(data)[at] != 0;
    }
  }
};

/// Writes `value` over a 0 and returns the value before. Entries of a step may claim or raise a number at once.
FLASHMASK_COLUMN int32_t claim(int32_t* at, int32_t value) {
#if defined(__CUDA_ARCH__)
  return atomicCAS(at, 0, value);
#else
  const int32_t was = *at;
  if (was == 0) *at = value;
  return was;
#endif
}

/// Writes `value` over a smaller number and returns the value before.
FLASHMASK_COLUMN int32_t raise(int32_t* at, int32_t value) {
#if defined(__CUDA_ARCH__)
  return atomicMax(at, value);
#else
  const int32_t was = *at;
  if (was < value) *at = value;
  return was;
#endif
}

/// The first n of [first, last) with x(lead, n) > value, or last; x ascends. On contents that do not, some n.
template <typename X>
FLASHMASK_COLUMN int64_t upper_bound(const X& x, const Lead& lead, int64_t first, int64_t last, int64_t value) {
  while (first < last) {
    const int64_t middle = first + (last - first) / 2;
    if (x(lead, middle) > value)
      last = middle;
    else
      first = middle + 1;
  }
  return first;
}

/// The first n with x(lead, n) >= value, or last.
template <typename X>
FLASHMASK_COLUMN int64_t lower_bound(const X& x, const Lead& lead, int64_t first, int64_t last, int64_t value) {
  return value == INT64_MIN ? first : upper_bound(x, lead, first, last, value - 1);
}

/// How many of `count` ascending entries are at most a value that mostly grows from one search to the next.
class Search {
 public:
  template <typename X>
  FLASHMASK_COLUMN int64_t operator()(const X& x, const Lead& lead, int64_t count, int64_t value) const {
    if (!is(x, lead, count, value, found_) && !is(x, lead, count, value, ++found_))
      found_ = upper_bound(x, lead, 0, count, value);
    return found_;
  }

 private:
  template <typename X>
  FLASHMASK_COLUMN static bool is(const X& x, const Lead& lead, int64_t count, int64_t value, int64_t found) {
    return found <= count && (found == 0 || x(lead, found - 1) <= value) && (found == count || x(lead, found) > value);
  }
  mutable int64_t found_ = 0;
};

}  // namespace flashmask::build
