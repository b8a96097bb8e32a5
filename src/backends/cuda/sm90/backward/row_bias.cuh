// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>

#include "backends/cuda/ptx/address.cuh"
#include "backends/cuda/ptx/registers.cuh"
#include "backends/cuda/ptx/tensor_core.cuh"
#include "backends/cuda/ptx/wgmma.cuh"
#include "backends/cuda/sm90/backward/params.h"

namespace flashmask::sm90::bwd {

/// Which of a row's two biases.
enum class Bias : uint32_t { kScore, kGradient };

/// `value` as three bfloat16 that add up to it, but for a rounding of 2^-24.
struct BiasParts {
  float part[3];

  __device__ __forceinline__ explicit BiasParts(float value) {
#pragma unroll
    for (float& p : part) {
      p = __bfloat162float(__float2bfloat16_rn(value));
      value -= p;
    }
  }
};

/// The biases of a row with this lse and delta. One that sees nothing, lse = -inf, has a score bias that makes its
/// probabilities 0. `scale` is the scores'; see BackwardParams.
__device__ __forceinline__ RowBias row_bias(float lse, float delta, float scale) {
  constexpr float kMost = 3e38f;  // finite, as it is also multiplied by zeros
  const bool sees = lse != -INFINITY;
  const float bias = sees ? -lse / scale : copysignf(kMost, -scale);
  const BiasParts s(bias > kMost ? kMost : bias < -kMost ? -kMost : bias), dp(sees ? -delta : 0.f);
  using T = __nv_bfloat16;
  return {{ptx::pack<T>(s.part[0], s.part[1]), ptx::pack<T>(s.part[2], dp.part[0]),
           ptx::pack<T>(dp.part[1], dp.part[2]), 0}};
}

/// A row's gradient bias, -delta.
__device__ __forceinline__ float gradient_bias(const RowBias& bias) {
  constexpr uint32_t kHigh = 0xffff0000;
  return __uint_as_float(bias.pair[1] & kHigh) + __uint_as_float(bias.pair[2] << 16) +
         __uint_as_float(bias.pair[2] & kHigh);
}

/// A row's biases with kTermsLast but without kFoldsDelta: two floats, -lse log2(e), added to scores in units of P's
/// exponent, and -delta.
__device__ __forceinline__ RowBias row_terms(float lse, float delta) {
  constexpr float kLog2E = 1.44269504f;
  const bool sees = lse != -INFINITY;
  return {{__float_as_uint(sees ? -lse * kLog2E : -INFINITY), __float_as_uint(sees ? -delta : 0.f), 0, 0}};
}
/// One of a row's terms; registers would not hold both from one use to the other.
template <Bias kTerm>
__device__ __forceinline__ float term_of(const RowBias& row) {
  return __uint_as_float(row.pair[static_cast<uint32_t>(kTerm)]);
}

/// Without this bit, which the next pair has, a finite float is two finite bfloat16: its lower half alone may be none.
inline constexpr uint32_t kSpareBit = 0x4000;

/// A row's biases with both: a float of lse as in row_terms, whose halves the step of dP's product multiplies by zeros,
/// and -delta as in row_bias.
__device__ __forceinline__ RowBias row_term_and_bias(float lse, float delta) {
  constexpr float kLog2E = 1.44269504f;
  RowBias row = row_bias(lse, delta, 1);
  const float term = lse == -INFINITY ? -3e38f : -lse * kLog2E;
  const uint32_t bits = __float_as_uint(isinf(term) ? copysignf(3e38f, term) : term);
  row.pair[0] = bits & ~kSpareBit;
  row.pair[1] = (row.pair[1] & 0xffff0000) | (bits & kSpareBit);
  return row;
}
__device__ __forceinline__ float folded_score_term(const RowBias& row) {
  const uint2 words = *reinterpret_cast<const uint2*>(&row);
  return __uint_as_float(words.x | (words.y & kSpareBit));
}

/// How an operand of rows' biases lies in shared memory. Without a swizzle: groups of 8 rows of 16 bytes, 128 bytes
/// apart; the next 8 columns at the same place.
inline constexpr uint64_t kBiasGroups = uint64_t{128 >> 4} << 32;

/// Ones in the columns of the bias, as the lane has them in an operand's first eight columns; the same in every tile.
template <Bias kBias>
__device__ __forceinline__ uint32_t bias_ones() {
  constexpr uint32_t kBegin = kBias == Bias::kScore ? 0 : 3;
  const auto one = [](uint32_t column) { return column - kBegin < 3 ? 0x3f80u : 0u; };  // 1 in bfloat16
  const uint32_t column = 2 * (threadIdx.x % 4);                                        // the lane's first
  return one(column) | one(column + 1) << 16;
}

/// Adds the biases of the rows, in shared memory at `biases`, to `scores`, 64 keys x kRows, as one step of their
/// product: `ones`, from registers, times the rows' eight bfloat16. The step's other eight columns are zeros times the
/// same eight.
template <int kRows>
class BiasStep {
 public:
  /// Call it before wgmma_fence.
  __device__ __forceinline__ BiasStep(uint32_t biases, uint32_t ones) : ones_{ones, ones, 0, 0}, biases_(biases >> 4) {
#pragma unroll
    for (uint32_t& word : ones_) word = ptx::opaque(word);
  }

  __device__ __forceinline__ void issue(float (&scores)[kRows / 2]) const {
    ptx::wgmma_rs<__nv_bfloat16, kRows, ptx::Major::kInner>(scores, ones_, kBiasGroups | biases_, true);
  }

 private:
  uint32_t ones_[4];
  uint32_t biases_;
};

/// Stands for BiasStep if the biases are no step of a product.
struct NoBiasStep {
  template <int kValues>
  __device__ __forceinline__ void issue(float (&)[kValues]) const {}
};

/// Ones in the columns of the score bias of eight rows, and zeros in the eight columns after them. All rows of the
/// operand are alike.
struct alignas(128) ScoreOnes {
  uint4 row[2][8];

  __device__ __forceinline__ void fill() {
    for (uint4& ones : row[0]) ones = {0x3f803f80, 0x3f80, 0, 0};  // 1 in bfloat16
    for (uint4& zeros : row[1]) zeros = {0, 0, 0, 0};
  }
};

/// As BiasStep of scores, with the ones in shared memory instead of registers.
template <int kRows>
class SharedBiasStep {
 public:
  __device__ __forceinline__ SharedBiasStep(uint32_t biases, uint32_t ones) : ones_(ones >> 4), biases_(biases >> 4) {}

  __device__ __forceinline__ void issue(float (&scores)[kRows / 2]) const {
    constexpr uint64_t kNextColumns = uint64_t{sizeof(ScoreOnes::row[0]) >> 4} << 16;
    ptx::wgmma_ss<__nv_bfloat16, kRows, ptx::Major::kInner, ptx::Major::kInner>(scores, kNextColumns | ones_,
                                                                                kBiasGroups | biases_, true);
  }

 private:
  uint32_t ones_, biases_;
};

}  // namespace flashmask::sm90::bwd
