// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/ptx/registers.cuh"

namespace flashmask::cuda {

/// tanh for softcaps: (e - 1) / (e + 1) = 1 - 2 / (1 + e) with e = exp(2x), in place, of x = `factor` times some numbers.
/// Absolute error 3e-7: the subtraction loses the digits of small results. Numbers go by twos, which share a reciprocal,
/// and nothing else: a NaN stays where it is.
template <int kCount>
__device__ __forceinline__ void tanh_of(float (&x)[kCount], float factor) {
  static_assert(kCount % 2 == 0);
  constexpr float kTwoLog2E = 2.88539008177792681f;
  constexpr float kMost = 1 << 30;  // 1 - tanh is 2^-29 there; the product of two sums is still an ordinary number
  const float exponent_factor = factor * kTwoLog2E;
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    // fminf takes the number of a number and a NaN; tanh is never above e, so the last minimum brings back the NaN alone.
    const float e[2] = {ptx::exp2_approx(x[i] * exponent_factor), ptx::exp2_approx(x[i + 1] * exponent_factor)};
    const float a = 1 + fminf(e[0], kMost), b = 1 + fminf(e[1], kMost), inverse = ptx::inverse_approx(a * b);
    x[i] = ptx::min_or_nan(1 - 2 * (b * inverse), e[0]);
    x[i + 1] = ptx::min_or_nan(1 - 2 * (a * inverse), e[1]);
  }
}

/// The same with the digits of small results: relative error 2e-6. Where |x| < 1/4 a polynomial, which is cut off from
/// the power series after x^7.
template <int kCount>
__device__ __forceinline__ void tanh_near_zero_of(float (&x)[kCount], float factor) {
  constexpr float kLargest = 0.125f, kTwoLog2E = 2.88539008177792681f;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float y = x[i] * factor, square = y * y, cubic = square * ((square - 2.5f) * (2.f / 15));
    const float rest = ptx::inverse_approx(1 + ptx::exp2_approx(y * kTwoLog2E));
    x[i] = fabsf(y) < kLargest ? y + y * cubic : 1 - 2 * rest;
  }
}

}  // namespace flashmask::cuda
