// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>

#include <type_traits>

#include "backends/cuda/ptx/registers.cuh"

namespace flashmask::cuda {

inline constexpr float kTwoLog2E = 2.88539008177792681f;

/// (1 - tanh y) / 2 = 1 / (1 + e^2y).
__device__ __forceinline__ float half_of_rest(float y) {
  return ptx::inverse_approx(1 + ptx::exp2_approx(y * kTwoLog2E));
}

/// tanh for a softcap of usual size. The relative error of the hardware's, 2^-11, is below what bfloat16 loses of the
/// products, but not below what float16 does, which takes one of 4e-5: near 0, where 1 - 2 half_of_rest has no digits
/// left, tanh y is y.
template <typename Element>
__device__ __forceinline__ float usual_tanh(float y) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    return ptx::tanh_approx(y);
  } else {
    const float tanh = 1 - 2 * half_of_rest(y);
    return fabsf(y) < 0x1p-7f ? y : tanh;
  }
}

/// usual_tanh of `factor` times some numbers, in place.
template <typename Element, int kCount>
__device__ __forceinline__ void tanh_of(float (&x)[kCount], float factor) {
#pragma unroll
  for (float& value : x) value = usual_tanh<Element>(value * factor);
}

/// tanh of small y, |y| < kSmall, with its digits: the power series' beginning, relative error 2e-6.
inline constexpr float kSmall = 0.125f;
__device__ __forceinline__ float tanh_of_small(float y) {
  const float square = y * y, cubic = square * ((square - 2.5f) * (2.f / 15));
  return y + y * cubic;
}

/// The same with relative error 2e-6, for softcaps so large that tanh_of's, which are theirs times it, would show.
template <int kCount>
__device__ __forceinline__ void tanh_near_zero_of(float (&x)[kCount], float factor) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float y = x[i] * factor, rest = half_of_rest(y);
    x[i] = fabsf(y) < kSmall ? tanh_of_small(y) : 1 - 2 * rest;
  }
}

/// As tanh_of, and multiplies `gradients` by the derivatives by `factor` times x.
template <typename Element, int kCount>
__device__ __forceinline__ void tanh_and_slope_of(float (&x)[kCount], float factor, float (&gradients)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    x[i] = usual_tanh<Element>(x[i] * factor);
    gradients[i] *= __fmaf_rn(-x[i], x[i], 1.f);
  }
}

/// As tanh_near_zero_of, and multiplies `gradients` likewise: 1 - tanh^2 is 4 e^2x / (1 + e^2x)^2, no difference of
/// numbers near each other. A NaN becomes a number: in the backward its row's lse is one, too.
template <int kCount>
__device__ __forceinline__ void tanh_and_slope_near_zero_of(float (&x)[kCount], float factor,
                                                            float (&gradients)[kCount]) {
  constexpr float kMost = 60;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float y = x[i] * factor, e = ptx::exp2_approx(fminf(y * kTwoLog2E, kMost)),
                rest = 2 * ptx::inverse_approx(1 + e);
    x[i] = fabsf(y) < kSmall ? tanh_of_small(y) : 1 - rest;
    gradients[i] *= e * rest * rest;
  }
}

}  // namespace flashmask::cuda
