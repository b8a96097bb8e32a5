// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/fragments/fragments.cuh"
#include "backends/cuda/ptx/registers.cuh"

namespace flashmask::cuda {

/// Effects of a tile's scores on a warp's rows.
struct Raised {
  bool row_max;  ///< raised in one row or more
  bool rescale;  ///< O has to be multiplied by the factors: a raised row had seen keys before
};

/// Online softmax of a thread's two rows (rows g and g + 8 of its warp's slab), spread over the four lanes of a quad.
/// Probabilities are taken relative to a row_max that may lag behind the running maximum, so that O is seldom rescaled.
/// It is raised to the maximum when that has outgrown it by 2^8, which fp32 sums bear easily, or by about the row's sum
/// so far: the probability of a key that weighs more than all before it has to be exactly 1, as its rounding would show
/// in the output. A row's row_max depends on its own scores alone: its limit only ever grows with its sum, so it does
/// not matter at which tiles the warp looked at it again.
struct RowState {
  static constexpr int kSlackLog2 = 8;
  static constexpr float kLn2 = 0.693147180559945309f;
  float row_max[2];  ///< in units of the scores; -inf until the row has seen a key
  float sum[2];      ///< this thread's part
  float limit[2];    ///< scores up to here leave row_max as it is

  __device__ __forceinline__ void reset() {
    row_max[0] = row_max[1] = limit[0] = limit[1] = -INFINITY;
    sum[0] = sum[1] = 0;
  }

  /// Takes a tile's scores into account, and answers for the whole warp. A row whose row_max stays, or that saw its
  /// first key, has a factor of exactly 1.
  template <int kScores>
  __device__ __forceinline__ Raised raise_row_max(const float (&s)[kScores], float scale_log2, float score_of_bit,
                                                  float (&factor)[2]) {
    const int32_t bits[2] = {largest_bits(s, 0), largest_bits(s, 1)};
    if (__all_sync(0xffffffff, is_settled(bits[0], 0) & is_settled(bits[1], 1))) return {false, false};
    float largest[2] = {__int_as_float(bits[0]), __int_as_float(bits[1])};
    if (__any_sync(0xffffffff, (bits[0] | bits[1]) < 0)) {
      largest[0] = largest_score(s, 0);
      largest[1] = largest_score(s, 1);
    }
    const bool raised[2] = {raise_row(largest[0], 0, scale_log2, score_of_bit, factor[0]),
                            raise_row(largest[1], 1, scale_log2, score_of_bit, factor[1])};
    return {__any_sync(0xffffffff, raised[0] | raised[1]) != 0,
            __any_sync(0xffffffff, factor[0] != 1 || factor[1] != 1) != 0};
  }
  /// True if raise_row_max surely has nothing to do for this thread's scores of a tile.
  template <int kScores>
  __device__ __forceinline__ bool is_settled(const float (&s)[kScores]) const {
    return is_settled(largest_bits(s, 0), 0) & is_settled(largest_bits(s, 1), 1);
  }

  template <int kOutputs>
  __device__ __forceinline__ static void rescale(float (&o)[kOutputs], const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) o[i] *= factor[i / 2 % 2];
  }

  /// After a tile that raised a row_max, when its probabilities are in the sum: a limit that is about to be outgrown
  /// would have the next tile looked at again.
  __device__ __forceinline__ void refresh_limits(float score_of_bit) {
    limit[0] = current_limit(0, score_of_bit);
    limit[1] = current_limit(1, score_of_bit);
  }

  /// Turns the scores of one half of the tile's keys into probabilities, in place.
  template <int kScores>
  __device__ __forceinline__ void exponentiate(float (&s)[kScores], int half_of_keys, float scale_log2) {
    constexpr int kHalf = kScores / 2;
    const float bias[2] = {finite_bias(0, scale_log2), finite_bias(1, scale_log2)};
#pragma unroll
    for (int at = kHalf * half_of_keys; at < kHalf * half_of_keys + kHalf; at += 2) {
      const int row = at / 2 % 2;
      s[at] = ptx::exp2_approx(s[at] * scale_log2 - bias[row]);
      s[at + 1] = ptx::exp2_approx(s[at + 1] * scale_log2 - bias[row]);
      sum[row] += s[at] + s[at + 1];
    }
  }

  /// One half of the tile's probabilities in the register layout of the product's A operand.
  template <typename Element, int kScores>
  __device__ __forceinline__ static void pack(const float (&s)[kScores], int half_of_keys,
                                              uint32_t (&p)[kScores / 16][4]) {
#pragma unroll
    for (int step = 0; step < kScores / 16; ++step) {
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        const int at = kScores / 2 * half_of_keys + 8 * step + 2 * pair;
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

  /// Finishes O and lse with one more column, of score `sink` and without a value: -inf is none. Multiplies the weights
  /// in O by `weight_scale`. Terms are relative to the larger of row_max and the sink, so neither overflows.
  template <int kOutputs>
  __device__ __forceinline__ void finish(float (&o)[kOutputs], float sink, float weight_scale, float scale_log2,
                                         float (&lse)[2]) const {
    constexpr float kLog2E = 1.44269504088896341f, kMost = 3e38f;  // not infinity: differences of infinities are NaN
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float of_scores = is_empty(half) ? -INFINITY : row_max[half] * scale_log2,
                  of_sink = ptx::min_or_nan(sink * kLog2E, kMost), most = fmaxf(of_scores, of_sink),
                  none = most == -INFINITY ? 0.f : most;
      const float unit = ptx::exp2_approx(of_scores - none),
                  all = quad_sum(sum[half]) * unit + ptx::exp2_approx(of_sink - none);
      factor[half] = is_empty(half) ? 0.f : unit * weight_scale / all;
      // Without a sink the bits equal lse()'s.
      lse[half] =
          of_sink > of_scores ? sink + log2f(all) * kLn2 : __fmaf_rn(row_max[half], scale_log2, log2f(all)) * kLn2;
    }
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) o[i] *= factor[i / 2 % 2];
  }

  /// Natural log of the sum of exponentials; after `finish`.
  __device__ __forceinline__ float lse(int half, float scale_log2) const {
    return is_empty(half) ? -INFINITY : __fmaf_rn(row_max[half], scale_log2, log2f(sum[half])) * kLn2;
  }

 protected:
  __device__ __forceinline__ bool is_empty(int half) const { return row_max[half] == -INFINITY; }
  __device__ __forceinline__ float finite_bias(int half, float scale_log2) const {
    return is_empty(half) ? 0.f : row_max[half] * scale_log2;
  }

  /// Raises a row's row_max if this tile asks for it, and updates its limit. `largest` is of this thread's scores.
  __device__ __forceinline__ bool raise_row(float largest, int half, float scale_log2, float score_of_bit,
                                            float& factor) {
    largest = quad_max(largest);
    limit[half] = current_limit(half, score_of_bit);
    const bool raise = largest > limit[half];
    // Before a row's first key there is nothing to rescale.
    factor = raise && !is_empty(half) ? ptx::exp2_approx((row_max[half] - largest) * scale_log2) : 1.f;
    if (raise) row_max[half] = limit[half] = largest;
    sum[half] *= factor;
    return raise;
  }

  /// How far the scores may grow now: by the sum's power of two, which unlike a logarithm surely grows with it.
  __device__ __forceinline__ float current_limit(int half, float score_of_bit) const {
    const int sum_log2 = (__float_as_int(quad_sum(sum[half])) >> 23) - 127;
    return row_max[half] + static_cast<float>(min(max(sum_log2, 0), kSlackLog2)) * score_of_bit;
  }

  /// True if this thread's scores of a row surely leave its row_max as it is.
  __device__ __forceinline__ bool is_settled(int32_t largest_bits, int half) const {
    return (limit[half] >= 0) & (__int_as_float(largest_bits) <= limit[half]);
  }

  /// The bits of the largest of this thread's scores of a row if it is not negative, else something negative. Half the
  /// steps of a maximum: read as integers, positive floats keep their order and negative ones are smaller, and there
  /// the largest of three is one instruction.
  template <int kScores>
  __device__ __forceinline__ static int32_t largest_bits(const float (&s)[kScores], int half) {
    static_assert(kScores % 8 == 0);
    const auto bits = [&](int j, int e) { return __float_as_int(s[4 * j + 2 * half + e]); };
    int even = max(bits(0, 0), bits(0, 1)), odd = max(bits(1, 0), bits(1, 1));
#pragma unroll
    for (int j = 2; j < kScores / 4; j += 2) {
      even = __vimax3_s32(even, bits(j, 0), bits(j, 1));
      odd = __vimax3_s32(odd, bits(j + 1, 0), bits(j + 1, 1));
    }
    return max(even, odd);
  }

  template <int kScores>
  __device__ __forceinline__ static float largest_score(const float (&s)[kScores], int half) {
    static_assert(kScores == 8 || kScores >= 16);
    if constexpr (kScores == 8) {
      return fmaxf(fmaxf(s[2 * half], s[2 * half + 1]), fmaxf(s[4 + 2 * half], s[5 + 2 * half]));
    } else {
      float m[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) m[i] = fmaxf(s[4 * i + 2 * half], s[4 * i + 2 * half + 1]);
#pragma unroll
      for (int j = 4; j < kScores / 4; ++j)
        m[j % 4] = fmaxf(m[j % 4], fmaxf(s[4 * j + 2 * half], s[4 * j + 2 * half + 1]));
      return fmaxf(fmaxf(m[0], m[1]), fmaxf(m[2], m[3]));
    }
  }
};

}  // namespace flashmask::cuda
