// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/ptx/registers.cuh"
#include "backends/cuda/sm90/backward/params.h"
#include "common/dropout.h"

namespace flashmask::sm90::bwd {

// What a score is: take() turns a product K Q^T into a score in units of P's exponent plus its row's term, and
// multiplies what dP has become by the score's derivative, but for softmax_scale.

/// The product times softmax_scale.
struct ScaledScore {
  const FeaturedBackwardParams& p;

  __device__ __forceinline__ void take(float& s, float&, float row_term) const {
    s = __fmaf_rn(s, p.scale_log2, row_term);
  }
};

/// softcap tanh(x), x = softmax_scale / softcap times the product. With e = exp(2x) tanh(x) is 1 - 2 / (1 + e), and its
/// derivative 4 e / (1 + e)^2, no difference of numbers near each other.
struct CappedScore {
  const FeaturedBackwardParams& p;

  __device__ __forceinline__ void take(float& s, float& dp, float row_term) const {
    constexpr float kMost = 60;  // the derivative is 2^-58 there; e of more might not be finite
    const float e = ptx::exp2_approx(fminf(s * p.cap_exponent, kMost)),
                rest = ptx::reciprocal_approx(__fmaf_rn(0.5f, e, 0.5f));
    s = __fmaf_rn(rest, -p.cap_log2, row_term + p.cap_log2);
    dp *= e * rest * rest;
  }
};

/// A consumer's key of the draws of dropout.
struct DropoutKey {
  dropout::Key key;

  __device__ __forceinline__ explicit DropoutKey(const FeaturedBackwardParams& p) {
    const dropout::Key of_state = p.features.dropout.key();
    key = {ptx::uniform(of_state.low), ptx::uniform(of_state.high)};
  }
};
/// In its place where nothing is dropped.
struct NoDropoutKey {
  __device__ __forceinline__ explicit NoDropoutKey(const BackwardParams&) {}
};

}  // namespace flashmask::sm90::bwd
