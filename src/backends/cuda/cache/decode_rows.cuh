// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/fragments/element_mask.cuh"
#include "backends/cuda/fragments/softmax.cuh"

namespace flashmask::cuda {

/// A RowState of which only the first kRows of a thread's two rows are any, with equal bits for them. Few packed
/// rows lie where threads have but one: the exponentials of the other would take as long.
template <int kRows>
struct DecodeRows : RowState {
  static_assert(kRows == 1 || kRows == 2);
  static constexpr bool kBoth = kRows == 2;

  template <int kScores>
  __device__ __forceinline__ Raised raise_row_max(const float (&s)[kScores], float scale_log2, float score_of_bit,
                                                  float (&factor)[2]) {
    if constexpr (kRows == 2) {
      return RowState::raise_row_max(s, scale_log2, score_of_bit, factor);
    } else {
      const int32_t bits = largest_bits(s, 0);
      if (__all_sync(0xffffffff, is_settled(bits, 0))) return {false, false};
      float largest = __int_as_float(bits);
      if (__any_sync(0xffffffff, bits < 0)) largest = largest_score(s, 0);
      const bool raised = raise_row(largest, 0, scale_log2, score_of_bit, factor[0]);
      return {__any_sync(0xffffffff, raised) != 0, __any_sync(0xffffffff, factor[0] != 1) != 0};
    }
  }

  /// Makes hidden scores of these rows -inf.
  template <int kScores>
  __device__ __forceinline__ static void hide(const SlabBits& visible, float (&s)[kScores]) {
    if constexpr (kRows == 2) {
      visible.hide(s);
    } else {
#pragma unroll
      for (int bit = 0; bit < kScores / 2; ++bit)
        ptx::hide_unless(visible.row[0] & 1u << bit, s[bit / 2 * 4 + bit % 2]);
    }
  }

  template <int kOutputs>
  __device__ __forceinline__ static void rescale(float (&o)[kOutputs], const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i)
      if (i / 2 % 2 < kRows) o[i] *= factor[i / 2 % 2];
  }

  __device__ __forceinline__ void refresh_limits(float score_of_bit) {
#pragma unroll
    for (int row = 0; row < kRows; ++row) limit[row] = current_limit(row, score_of_bit);
  }

  template <int kScores>
  __device__ __forceinline__ void exponentiate(float (&s)[kScores], int half_of_keys, float scale_log2) {
    constexpr int kHalf = kScores / 2;
    float bias[kRows];
#pragma unroll
    for (int row = 0; row < kRows; ++row) bias[row] = finite_bias(row, scale_log2);
#pragma unroll
    for (int at = kHalf * half_of_keys; at < kHalf * half_of_keys + kHalf; at += 2) {
      const int row = at / 2 % 2;
      if (row >= kRows) continue;
      s[at] = ptx::exp2_approx(s[at] * scale_log2 - bias[row]);
      s[at + 1] = ptx::exp2_approx(s[at + 1] * scale_log2 - bias[row]);
      sum[row] += s[at] + s[at + 1];
    }
  }

  template <typename Element, int kScores>
  __device__ __forceinline__ static void pack(const float (&s)[kScores], int half_of_keys,
                                              uint32_t (&p)[kScores / 16][4]) {
#pragma unroll
    for (int step = 0; step < kScores / 16; ++step) {
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        const int at = kScores / 2 * half_of_keys + 8 * step + 2 * pair;
        p[step][pair] = pair % 2 < kRows ? ptx::pack<Element>(s[at], s[at + 1]) : 0;
      }
    }
  }
};

}  // namespace flashmask::cuda
