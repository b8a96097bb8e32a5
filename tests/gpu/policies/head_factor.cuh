// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace flashmask::test {

/// A Score that multiplies q.k by a factor of the query head.
struct HeadFactor {
  static constexpr bool kFoldsLse = false;
  float factor;

  template <typename Params>
  __device__ __forceinline__ HeadFactor(const Params& p, uint32_t /*batch*/, uint32_t head)
      : factor(__ldg(p.factors + head)) {}

  template <int kScores>
  __device__ __forceinline__ void transform(float (&s)[kScores]) const {
#pragma unroll
    for (float& score : s) score *= factor;
  }
  __device__ __forceinline__ bool given() const { return true; }
  __device__ __forceinline__ static constexpr bool is_usual() { return false; }
  template <int kScores>
  __device__ __forceinline__ void differentiate_usual(float (&)[kScores], float (&)[kScores]) const {}
  template <int kScores>
  __device__ __forceinline__ void differentiate(float (&s)[kScores], float (&gradients)[kScores]) const {
    transform(s);
    transform(gradients);
  }
};

}  // namespace flashmask::test
