// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/device/feature_params.h"
#include "backends/cuda/device/softcap.cuh"
#include "backends/cuda/ptx/registers.cuh"

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

/// Lowers a fragment's scores by ALiBi's slope * |row - key|.
template <int kScores, typename Places>
__device__ __forceinline__ void add_biases(const ScoreParams& p, uint32_t batch, uint32_t head, const Places& places,
                                           float (&s)[kScores]) {
  const float slope = __ldg(p.alibi.slopes + p.alibi.index(batch, head)) * p.alibi.per_unit;
  const float first = slope * static_cast<float>(places.first.row - places.first.key + p.q_offset);
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    const auto step = static_cast<float>(Places::step(i).row - Places::step(i).key);
    s[i] -= copysignf(__fmaf_rn(slope, step, first), slope);
  }
}
/// Likewise where the mask has positions; scores past the ends take the last ones. Reads all anew for each score:
/// kernels have no registers to keep it in.
template <int kScores, typename MakePlaces>
__device__ __forceinline__ void add_position_biases(const AlibiParams& p, uint32_t batch, uint32_t head,
                                                    const MakePlaces& places, float (&s)[kScores]) {
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    const auto all = places();
    const int32_t row = min(all.first.row + all.step(i).row, p.last_row),
                  key = min(all.first.key + all.step(i).key, p.last_key),
                  q_pos = ptx::load_here(p.q_pos, batch * p.q_pos_stride + row),
                  k_pos = ptx::load_here(p.k_pos, batch * p.k_pos_stride + key);
    const uint32_t distance = static_cast<uint32_t>(max(q_pos, k_pos)) - static_cast<uint32_t>(min(q_pos, k_pos));
    const float slope = ptx::load_here(p.slopes, p.index(batch, head)) * p.per_unit;
    s[i] = __fmaf_rn(-slope, static_cast<float>(distance), s[i]);
  }
}

/// Scores of the call's features: the tanh of a softcap, then the biases of ALiBi, whichever it has, but not both over
/// positions. Element is that of Q and K.
template <typename Element>
class FeatureScore {
 public:
  static constexpr bool kFoldsLse = false;
  const ScoreForm form;

  template <typename Params>
  __device__ __forceinline__ FeatureScore(const Params& p, uint32_t batch, uint32_t head)
      : form(p.scores.alibi.q_pos                                     ? ScoreForm::kShifted
             : p.scores.alibi.is_set() || p.features.softcap.is_set() ? ScoreForm::kOther
                                                                      : ScoreForm::kProducts),
        softcap_(p.features.softcap),
        scores_(p.scores),
        batch_(batch),
        head_(head) {}

  template <int kScores, typename MakePlaces>
  __device__ __forceinline__ void shift(float (&s)[kScores], const MakePlaces& places) const {
    add_position_biases(scores_.alibi, batch_, head_, places, s);
  }
  template <int kScores, typename MakePlaces>
  __device__ __forceinline__ void transform(float (&s)[kScores], const MakePlaces& places) const {
    change([&] { apply_softcap<Element>(s, softcap_.factor); }, places, s);
  }
  template <int kScores, typename MakePlaces>
  __device__ __forceinline__ void differentiate(float (&s)[kScores], float (&gradients)[kScores],
                                                const MakePlaces& places) const {
    change([&] { differentiate_cap(s, gradients); }, places, s);
  }
  /// True if a softcap alone makes the scores. Then differentiate_cap does what `differentiate` does, without branches.
  __device__ __forceinline__ bool only_caps() const { return form == ScoreForm::kOther && !scores_.alibi.is_set(); }
  template <int kScores>
  __device__ __forceinline__ void differentiate_cap(float (&s)[kScores], float (&gradients)[kScores]) const {
    softcap_gradient<Element>(s, softcap_.factor, gradients);
  }

 private:
  /// Caps the scores, adds biases, or both, in branches of which one is taken: instructions of branches in a row are
  /// merged by ptxas, which then spills.
  template <typename Cap, int kScores, typename MakePlaces>
  __device__ __forceinline__ void change(const Cap& cap, const MakePlaces& places, float (&s)[kScores]) const {
    if (!scores_.alibi.is_set()) {
      cap();
    } else if (!softcap_.is_set()) {
      add_biases(scores_, batch_, head_, places(), s);
    } else {
      cap();
      add_biases(scores_, batch_, head_, places(), s);
    }
  }

  const SoftcapParams& softcap_;
  const ScoreParams& scores_;
  uint32_t batch_, head_;
};

}  // namespace flashmask::cuda
