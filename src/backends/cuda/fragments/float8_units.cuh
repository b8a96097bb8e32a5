// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace flashmask::cuda {

// Powers of two that keep a call over a cache of e4m3 in the range of f16, whose products it takes.

/// The power of two that a row of q is multiplied by, so that none of it is too small for f16: its largest number
/// becomes 2^14 or more.
struct QueryUnit {
  float factor, inverse;

  /// The unit of a row whose largest magnitude has these bits, as a float.
  __device__ __forceinline__ static QueryUnit of(uint32_t largest) {
    constexpr int32_t kLargest = 14, kMostFactor = 254;
    const int32_t factor = min(127 + 127 + kLargest - static_cast<int32_t>(largest >> 23), kMostFactor);
    return {__int_as_float(factor << 23), __int_as_float((254 - factor) << 23)};
  }
};

/// The unit of a row's O, in which its weights, multiplied by the factors of the values, become f16: a power of two
/// near the largest of these products, so that none that matters is too small. Exponents are biased as those of floats;
/// 0: the row has had no product yet.
struct RowUnit {
  int16_t exponent = 0, most = 0;  ///< most: the largest that the exponent was

  /// The unit after a step whose largest product is `largest`: another one if that is far from it. Units stay near the
  /// largest that they were, so that O stays finite.
  __device__ __forceinline__ RowUnit after(float largest) const {
    constexpr int32_t kAbove = 8, kBelow = 6, kMostDown = 60, kMost = 253;
    const auto product = static_cast<int32_t>(__float_as_uint(largest) >> 23);
    if (product == 0 || (product <= exponent + kAbove && product >= exponent - kBelow)) return *this;
    const int32_t most_yet = max(int32_t{most}, product);
    const int32_t next = min(max(max(product, most_yet - kMostDown), kLeast), kMost);
    return {static_cast<int16_t>(next), static_cast<int16_t>(most_yet)};
  }
  /// O's factor when it goes over to another unit.
  __device__ __forceinline__ float change_to(const RowUnit& other) const {
    return __int_as_float(min(max(exponent - other.exponent + 127, 0), 254) << 23);
  }
  __device__ __forceinline__ float inverse() const {
    return __int_as_float((254 - max(int32_t{exponent}, kLeast)) << 23);
  }
  __device__ __forceinline__ bool is_set() const { return exponent != 0; }
  __device__ __forceinline__ float value() const { return __int_as_float(exponent << 23); }

 private:
  static constexpr int32_t kLeast = 1;
};

}  // namespace flashmask::cuda
