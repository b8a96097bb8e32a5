// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/attention/features.h"
#include "backends/cuda/attention/softcap.cuh"

namespace flashmask::cuda {

/// The policy Score says what a product q.k becomes before softmax_scale, the mask and the softmax. This one leaves it
/// as it is. A policy is made for a head (batch entry, query head) from the kernel's parameters, and has
///   kFoldsLse: whether the backward may start S at -lse / softmax_scale, by a step of its product. It may only if the
///     score is the product, as the sum is formed before the score is;
///   transform(s): makes scores of a fragment of products;
/// and of the backward, where it is not kFoldsLse,
///   differentiate(s, gradients): the same, and multiplies the gradients by the scores' derivatives by the products;
///   given(): whether scores are other than products in this call;
///   is_usual(): whether they are in the usual way, and if so differentiate_usual(s, gradients).
struct ProductScore {
  static constexpr bool kFoldsLse = true;

  template <typename Params>
  __device__ __forceinline__ ProductScore(const Params&, uint32_t, uint32_t) {}

  template <int kScores>
  __device__ __forceinline__ void transform(float (&)[kScores]) const {}
};

/// The tanh of a softcap, if the call has one; otherwise the product. Element is that of Q and K.
template <typename Element>
class SoftcapScore {
 public:
  static constexpr bool kFoldsLse = false;

  template <typename Params>
  __device__ __forceinline__ SoftcapScore(const Params& p, uint32_t, uint32_t) : softcap_(p.features.softcap) {}

  template <int kScores>
  __device__ __forceinline__ void transform(float (&s)[kScores]) const {
    if (softcap_.given() && softcap_.softcap <= kMostOfShortTanh) tanh_of<Element>(s, softcap_.factor);
    if (softcap_.softcap > kMostOfShortTanh) tanh_near_zero_of(s, softcap_.factor);
  }
  template <int kScores>
  __device__ __forceinline__ void differentiate(float (&s)[kScores], float (&gradients)[kScores]) const {
    if (!softcap_.given()) return;
    if (is_usual()) {
      differentiate_usual(s, gradients);
    } else {
      tanh_and_slope_near_zero_of(s, softcap_.factor, gradients);
    }
  }

  __device__ __forceinline__ bool given() const { return softcap_.given(); }
  __device__ __forceinline__ bool is_usual() const { return given() && softcap_.softcap <= kMostOfShortTanh; }
  template <int kScores>
  __device__ __forceinline__ void differentiate_usual(float (&s)[kScores], float (&gradients)[kScores]) const {
    tanh_and_slope_of<Element>(s, softcap_.factor, gradients);
  }

 private:
  /// The softcap times the absolute error of tanh_of is the score's. Up to here that is below 1e-4.
  static constexpr float kMostOfShortTanh = 256;
  const SoftcapParams& softcap_;
};

}  // namespace flashmask::cuda
