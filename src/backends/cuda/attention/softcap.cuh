// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/ptx/registers.cuh"

namespace flashmask::cuda {

/// tanh for softcaps: 1 - 2 / (1 + e^2x), in place, of `factor` times some numbers. Absolute error 3e-7: the
/// subtraction loses the digits of small results. Numbers go by twos, which share a reciprocal.
template <int kCount>
__device__ __forceinline__ void tanh_of(float (&x)[kCount], float factor) {
  static_assert(kCount % 2 == 0);
  constexpr float kTwoLog2E = 2.88539008177792681f;
  constexpr float kMost = 30;  // 1 - tanh is 2^-29 there; the product of two sums is still an ordinary number
  const float exponent_factor = factor * kTwoLog2E;
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    const float a = 1 + ptx::exp2_approx(fminf(x[i] * exponent_factor, kMost)),
                b = 1 + ptx::exp2_approx(fminf(x[i + 1] * exponent_factor, kMost)),
                inverse = ptx::inverse_approx(a * b);
    x[i] = 1 - 2 * (b * inverse);
    x[i + 1] = 1 - 2 * (a * inverse);
  }
}

}  // namespace flashmask::cuda
