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

  __device__ __forceinline__ static constexpr bool is_product() { return false; }
  template <int kScores, typename MakePlaces>
  __device__ __forceinline__ void transform(float (&s)[kScores], const MakePlaces&) const {
#pragma unroll
    for (float& score : s) score *= factor;
  }
  template <int kScores, typename MakePlaces>
  __device__ __forceinline__ void differentiate(float (&s)[kScores], float (&gradients)[kScores],
                                                const MakePlaces& places) const {
    transform(s, places);
    transform(gradients, places);
  }
};

}  // namespace flashmask::test
