// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>

#include <type_traits>

#include "backends/cuda/ptx/registers.cuh"

namespace flashmask::cuda {

inline constexpr float kTwoLog2E = 2.88539008177792681f;

/// tanh with the precision that a product has. The relative error of the hardware's, 2^-11, is below what bfloat16
/// loses of the products, but not below what float16 does, which takes one of 4e-5: near 0, where 1 - 2 / (1 + e^2y)
/// has no digits left, tanh y is y.
template <typename Element>
__device__ __forceinline__ float element_tanh(float y) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    return ptx::tanh_approx(y);
  } else {
    const float tanh = 1 - 2 * ptx::inverse_approx(1 + ptx::exp2_approx(y * kTwoLog2E));
    return fabsf(y) < 0x1p-7f ? y : tanh;
  }
}

/// Takes the tanh of `factor` times some products, in place.
template <typename Element, int kCount>
__device__ __forceinline__ void apply_softcap(float (&x)[kCount], float factor) {
#pragma unroll
  for (float& value : x) value = element_tanh<Element>(value * factor);
}

/// Takes the tanh, and multiplies `gradients` by its derivatives with respect to `factor` times x.
template <typename Element, int kCount>
__device__ __forceinline__ void softcap_gradient(float (&x)[kCount], float factor, float (&gradients)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    x[i] = element_tanh<Element>(x[i] * factor);
    gradients[i] *= __fmaf_rn(-x[i], x[i], 1.f);
  }
}

}  // namespace flashmask::cuda
