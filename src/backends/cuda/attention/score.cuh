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
///   transform(qk): the score;
///   gradient(score): the derivative of the score by the product, at that score.
struct ProductScore {
  static constexpr bool kFoldsLse = true;

  template <typename Params>
  __device__ __forceinline__ ProductScore(const Params&, uint32_t, uint32_t) {}

  template <int kScores>
  __device__ __forceinline__ void transform(float (&)[kScores]) const {}
  __device__ __forceinline__ float transform(float qk) const { return qk; }
  __device__ __forceinline__ float gradient(float) const { return 1; }
};

/// The tanh of a softcap, if the call has one; otherwise the product.
class SoftcapScore {
 public:
  template <typename Params>
  __device__ __forceinline__ SoftcapScore(const Params& p, uint32_t, uint32_t) : softcap_(p.features.softcap) {}

  template <int kScores>
  __device__ __forceinline__ void transform(float (&s)[kScores]) const {
    if (softcap_.given()) tanh_of(s, softcap_.factor);
  }

 private:
  const SoftcapParams& softcap_;
};

}  // namespace flashmask::cuda
