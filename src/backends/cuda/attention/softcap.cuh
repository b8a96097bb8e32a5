// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/ptx/registers.cuh"

namespace flashmask::cuda {

/// tanh for softcaps: (e - 1) / (e + 1) = 1 - 2 / (1 + e) with e = exp(2x), in place, of x = `factor` times some
/// numbers. Absolute error 3e-7: the subtraction loses the digits of small results. Numbers go by twos, which share a
/// reciprocal, and nothing else: a NaN stays where it is.
template <int kCount>
__device__ __forceinline__ void tanh_of(float (&x)[kCount], float factor) {
  static_assert(kCount % 2 == 0);
  constexpr float kTwoLog2E = 2.88539008177792681f;
  constexpr float kMost = 1 << 30;  // 1 - tanh is 2^-29 there; the product of two sums is still an ordinary number
  const float exponent_factor = factor * kTwoLog2E;
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    // fminf takes the number of a number and a NaN; tanh is never above e, so the last minimum brings back the NaN
    // alone.
    const float e[2] = {ptx::exp2_approx(x[i] * exponent_factor), ptx::exp2_approx(x[i + 1] * exponent_factor)};
    const float a = 1 + fminf(e[0], kMost), b = 1 + fminf(e[1], kMost), inverse = ptx::inverse_approx(a * b);
    x[i] = ptx::min_or_nan(1 - 2 * (b * inverse), e[0]);
    x[i + 1] = ptx::min_or_nan(1 - 2 * (a * inverse), e[1]);
  }
}

/// tanh of small y, |y| < kSmall, with its digits: the power series' beginning, relative error 2e-6.
inline constexpr float kSmall = 0.125f;
__device__ __forceinline__ float tanh_of_small(float y) {
  const float square = y * y, cubic = square * ((square - 2.5f) * (2.f / 15));
  return y + y * cubic;
}

/// As tanh_of, with the digits of small results.
template <int kCount>
__device__ __forceinline__ void tanh_near_zero_of(float (&x)[kCount], float factor) {
  constexpr float kTwoLog2E = 2.88539008177792681f;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float y = x[i] * factor, rest = ptx::inverse_approx(1 + ptx::exp2_approx(y * kTwoLog2E));
    x[i] = fabsf(y) < kSmall ? tanh_of_small(y) : 1 - 2 * rest;
  }
}

/// As tanh_of, and multiplies `gradients` by the derivatives by `factor` times x: 1 - tanh^2 is 4 e^2x / (1 + e^2x)^2,
/// no difference of numbers near each other. A NaN becomes a number: in the backward its row's lse is one, too.
template <int kCount>
__device__ __forceinline__ void tanh_and_slope_of(float (&x)[kCount], float factor, float (&gradients)[kCount]) {
  static_assert(kCount % 2 == 0);
  constexpr float kTwoLog2E = 2.88539008177792681f;
  constexpr float kMost = 60;  // the derivative is 2^-58 there
  const float exponent_factor = factor * kTwoLog2E;
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    const float e = ptx::exp2_approx(fminf(x[i] * exponent_factor, kMost)),
                f = ptx::exp2_approx(fminf(x[i + 1] * exponent_factor, kMost)),
                twice_inverse = 2 * ptx::inverse_approx((1 + e) * (1 + f)),
                rest_of_e = twice_inverse + twice_inverse * f, rest_of_f = twice_inverse + twice_inverse * e;
    x[i] = 1 - rest_of_e;
    x[i + 1] = 1 - rest_of_f;
    gradients[i] *= e * rest_of_e * rest_of_e;
    gradients[i + 1] *= f * rest_of_f * rest_of_f;
  }
}

/// The same as tanh_near_zero_of.
template <int kCount>
__device__ __forceinline__ void tanh_and_slope_near_zero_of(float (&x)[kCount], float factor,
                                                            float (&gradients)[kCount]) {
  constexpr float kTwoLog2E = 2.88539008177792681f, kMost = 60;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float y = x[i] * factor, e = ptx::exp2_approx(fminf(y * kTwoLog2E, kMost)),
                rest = 2 * ptx::inverse_approx(1 + e);
    x[i] = fabsf(y) < kSmall ? tanh_of_small(y) : 1 - rest;
    gradients[i] *= e * rest * rest;
  }
}

}  // namespace flashmask::cuda
