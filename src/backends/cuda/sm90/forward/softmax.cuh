// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/ptx/tensor_core.cuh"

namespace flashmask::sm90 {

/// Online softmax of a thread's two rows (rows g and g + 8 of its warp's slab), spread over the four lanes of a
/// quad. Probabilities are taken relative to a reference that lags behind the running maximum: it is raised only
/// when the maximum has outgrown it by 2^8, which fp32 sums and outputs bear easily, so that O is seldom rescaled.
/// A row's reference depends on its own scores alone.
struct RowState {
  static constexpr float kSlackLog2 = 8.f;
  float reference[2];  ///< in units of the scores; -inf until the row has seen a key
  float sum[2];        ///< this thread's part

  __device__ __forceinline__ void reset() {
    reference[0] = reference[1] = -INFINITY;
    sum[0] = sum[1] = 0;
  }

  /// Takes a tile's scores into account. Returns, for the whole warp, whether O has to be multiplied by `factor`; a row
  /// whose reference stays has a factor of exactly 1.
  __device__ __forceinline__ bool raise_reference(const float (&s)[64], float scale_log2, float (&factor)[2]) {
    if (__all_sync(0xffffffff, is_settled(s, 0, scale_log2) & is_settled(s, 1, scale_log2))) return false;
    const float largest[2] = {quad_max(row_max(s, 0)), quad_max(row_max(s, 1))};
    // A first key makes the difference infinite; a row that still sees nothing makes it NaN, which raises nothing.
    const bool raise[2] = {(largest[0] - reference[0]) * scale_log2 > kSlackLog2, (largest[1] - reference[1]) * scale_log2 > kSlackLog2};
    if (!__any_sync(0xffffffff, raise[0] || raise[1])) return false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      factor[half] = raise[half] ? ptx::exp2_approx((reference[half] - largest[half]) * scale_log2) : 1.f;
      if (raise[half]) reference[half] = largest[half];
      sum[half] *= factor[half];
    }
    return true;
  }
  template <int kOutputs>
  __device__ __forceinline__ static void rescale(float (&o)[kOutputs], const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) o[i] *= factor[i / 2 % 2];
  }

  /// Turns the scores of one half of the tile's keys into probabilities, in place.
  __device__ __forceinline__ void exponentiate(float (&s)[64], int half_of_keys, float scale_log2) {
    const float bias[2] = {finite_bias(0, scale_log2), finite_bias(1, scale_log2)};
#pragma unroll
    for (int at = 32 * half_of_keys; at < 32 * half_of_keys + 32; at += 2) {
      const int row = at / 2 % 2;
      s[at] = ptx::exp2_approx(s[at] * scale_log2 - bias[row]);
      s[at + 1] = ptx::exp2_approx(s[at + 1] * scale_log2 - bias[row]);
      sum[row] += s[at] + s[at + 1];
    }
  }

  /// One half of the tile's probabilities in the register layout of the product's A operand.
  template <typename Element>
  __device__ __forceinline__ static void pack(const float (&s)[64], int half_of_keys, uint32_t (&p)[4][4]) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        const int at = 32 * half_of_keys + 8 * step + 2 * pair;
        p[step][pair] = ptx::pack<Element>(s[at], s[at + 1]);
      }
    }
  }

  /// O = O / sum; rows that saw nothing are 0. Afterwards `sum` is the whole row's.
  template <int kOutputs>
  __device__ __forceinline__ void finish(float (&o)[kOutputs]) {
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] = quad_sum(sum[half]);
      inverse[half] = is_empty(half) ? 0.f : 1.f / sum[half];
    }
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) o[i] *= inverse[i / 2 % 2];
  }

  /// Natural log of the sum of exponentials; after `finish`.
  __device__ __forceinline__ float lse(int half, float scale_log2) const {
    constexpr float kLn2 = 0.693147180559945309f;
    return is_empty(half) ? -INFINITY : (reference[half] * scale_log2 + log2f(sum[half])) * kLn2;
  }

 private:
  __device__ __forceinline__ bool is_empty(int half) const { return reference[half] == -INFINITY; }
  __device__ __forceinline__ float finite_bias(int half, float scale_log2) const {
    return is_empty(half) ? 0.f : reference[half] * scale_log2;
  }

  /// Whether this thread's scores of a row surely leave its reference as it is, in half the steps of a maximum: read as
  /// integers, positive floats keep their order and negative ones are smaller, so that the largest of three at a time
  /// is right wherever a score could matter, which is above a reference that is not far below 0.
  __device__ __forceinline__ bool is_settled(const float (&s)[64], int half, float scale_log2) const {
    const auto bits = [&](int j, int e) { return __float_as_int(s[4 * j + 2 * half + e]); };
    int even = max(bits(0, 0), bits(0, 1)), odd = max(bits(1, 0), bits(1, 1));
#pragma unroll
    for (int j = 2; j < 16; j += 2) {
      even = __vimax3_s32(even, bits(j, 0), bits(j, 1));
      odd = __vimax3_s32(odd, bits(j + 1, 0), bits(j + 1, 1));
    }
    const float scaled = reference[half] * scale_log2;
    return (scaled >= -kSlackLog2) & (__int_as_float(max(even, odd)) * scale_log2 - scaled <= kSlackLog2);
  }

  __device__ __forceinline__ static float row_max(const float (&s)[64], int half) {
    float m[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) m[i] = fmaxf(s[4 * i + 2 * half], s[4 * i + 2 * half + 1]);
#pragma unroll
    for (int j = 4; j < 16; ++j) m[j % 4] = fmaxf(m[j % 4], fmaxf(s[4 * j + 2 * half], s[4 * j + 2 * half + 1]));
    return fmaxf(fmaxf(m[0], m[1]), fmaxf(m[2], m[3]));
  }
  __device__ __forceinline__ static float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
  }
  __device__ __forceinline__ static float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffff, x, 1);
    return x + __shfl_xor_sync(0xffffffff, x, 2);
  }
};

}  // namespace flashmask::sm90
