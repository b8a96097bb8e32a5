// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/device/score.cuh"

namespace flashmask::test {

/// A Score that multiplies q.k by a factor of the query head.
struct HeadFactor {
  static constexpr bool kFoldsLse = false;
  static constexpr cuda::ScoreForm form = cuda::ScoreForm::kOther;
  float factor;

  template <typename Params>
  __device__ __forceinline__ HeadFactor(const Params& p, uint32_t /*batch*/, uint32_t head)
      : factor(__ldg(p.factors + head)) {}

  template <int kScores, typename MakePlaces>
  __device__ __forceinline__ void shift(float (&)[kScores], const MakePlaces&) const {}
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
