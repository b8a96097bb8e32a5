// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/device/feature_params.h"
#include "backends/cuda/device/softcap.cuh"

namespace flashmask::cuda {

/// Row and key of a score.
struct Place {
  int32_t row, key;
};

/// Places of a fragment's scores: the first one's, and from there constant steps, Steps::row(i) and Steps::key(i),
/// which cost no registers.
template <typename Steps>
struct Places {
  Place first;
  __host__ __device__ static constexpr Place step(int i) { return {Steps::row(i), Steps::key(i)}; }
};

/// Scores are products q.k, products to which something is added, or anything else.
enum class ScoreForm : uint8_t { kProducts, kShifted, kOther };

/// The policy Score: what a product q.k becomes before the factor score_unit, the mask and the softmax. This one leaves
/// it as it is. A policy is made for a head (batch entry, query head) from the kernel's parameters, and has
///   kFoldsLse: whether the backward may start S at -lse / scale, by a step of its product. It may only if the
///     score is the product, as the sum is formed before the score is;
///   form: the form of the call's scores. That of products calls none of the functions below;
///   shift(s, places): makes scores of a fragment of products if they are shifted; places() are their Places;
///   transform(s, places): makes scores of any other form;
///   differentiate(s, gradients, places): transforms likewise, and multiplies the gradients by the scores' derivatives
///     by the products.
struct ProductScore {
  static constexpr bool kFoldsLse = true;
  static constexpr ScoreForm form = ScoreForm::kProducts;

  template <typename Params>
  __device__ __forceinline__ ProductScore(const Params&, uint32_t, uint32_t) {}

  template <int kScores, typename MakePlaces>
  __device__ __forceinline__ void shift(float (&)[kScores], const MakePlaces&) const {}
  template <int kScores, typename MakePlaces>
  __device__ __forceinline__ void transform(float (&)[kScores], const MakePlaces&) const {}
};

/// Scores of the call's features: the tanh of a softcap, if it has one. Element is that of Q and K.
template <typename Element>
class FeatureScore {
 public:
  static constexpr bool kFoldsLse = false;
  const ScoreForm form;

  template <typename Params>
  __device__ __forceinline__ FeatureScore(const Params& p, uint32_t, uint32_t)
      : form(p.features.softcap.is_set() ? ScoreForm::kOther : ScoreForm::kProducts), softcap_(p.features.softcap) {}

  template <int kScores, typename MakePlaces>
  __device__ __forceinline__ void shift(float (&)[kScores], const MakePlaces&) const {}
  template <int kScores, typename MakePlaces>
  __device__ __forceinline__ void transform(float (&s)[kScores], const MakePlaces&) const {
    apply_softcap<Element>(s, softcap_.factor);
  }
  template <int kScores, typename MakePlaces>
  __device__ __forceinline__ void differentiate(float (&s)[kScores], float (&gradients)[kScores],
                                                const MakePlaces&) const {
    if (softcap_.softcap <= kLargest) {
      softcap_gradient<Element>(s, softcap_.factor, gradients);
    } else {  // Is never taken: without an alternative ptxas merges this branch with its surroundings, and spills.
#pragma unroll
      for (float& score : s) score *= softcap_.factor;
    }
  }

 private:
  static constexpr float kLargest = 256;  ///< that a call may have
  const SoftcapParams& softcap_;
};

}  // namespace flashmask::cuda
