// SPDX-License-Identifier: Apache-2.0

// Scores of a call's features, from scaled products.

// Included by tile_kernels.cpp, once for each instruction set.
#if defined(FLASHMASK_BACKENDS_CPU_SCORES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FLASHMASK_BACKENDS_CPU_SCORES_INL_H_
#undef FLASHMASK_BACKENDS_CPU_SCORES_INL_H_
#else
#define FLASHMASK_BACKENDS_CPU_SCORES_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include "backends/cpu/simd-inl.h"
#include "backends/cpu/softmax-inl.h"
#include "call/alibi.h"
#include "call/problem.h"

HWY_BEFORE_NAMESPACE();
namespace flashmask::cpu::HWY_NAMESPACE {

/// The place of a panel of scores: batch entry, query head, first row, first key. Its lanes are keys or rows, whichever
/// the kernel has in a vector.
struct PanelPlace {
  int64_t b, h, row, key;
  bool lanes_are_keys;
};

/// True if scores' derivatives by the scaled products are other than 1.
inline bool has_slopes(const Problem& p) { return p.features.softcap != 0; }

/// softcap * tanh(score / softcap), and its derivative by the score.
struct Capped {
  Vec score, slope;
};
HWY_INLINE Capped capped(Vec score, float softcap) {
  const Vec x = hn::Mul(score, hn::Set(kFloats, 1.0f / softcap)), magnitude = hn::Abs(x), one = hn::Set(kFloats, 1.0f),
            two = hn::Set(kFloats, 2.0f);
  // 1 - tanh: of it neither tanh near 1 nor the derivative near 0, (1 - tanh) (1 + tanh), loses digits.
  const Vec rest = hn::Div(two, hn::Add(exp_any(hn::Mul(two, magnitude)), one));
  // Near 0 tanh would: there a polynomial within 2e-8.
  const Vec square = hn::Mul(x, x);
  Vec p = hn::MulAdd(square, hn::Set(kFloats, 0.017241487f), hn::Set(kFloats, -0.053045492f));
  p = hn::MulAdd(square, p, hn::Set(kFloats, 0.13325879f));
  p = hn::MulAdd(square, p, hn::Set(kFloats, -0.33333144f));
  const Vec near_zero = hn::MulAdd(hn::Mul(square, magnitude), p, magnitude);
  const Vec tanh = hn::IfThenElse(hn::Lt(magnitude, hn::Set(kFloats, 0.5f)), near_zero, hn::Sub(one, rest));
  return {hn::Mul(hn::Set(kFloats, softcap), hn::CopySign(tanh, x)), hn::Mul(rest, hn::Sub(two, rest))};
}

/// Caps the scores of a panel in place; the derivatives go to `slopes`, if that is somewhere.
inline void cap_scores(float softcap, int64_t count, Rows scores, Rows slopes) {
  for (int64_t n = 0; n < count; ++n, scores.at += scores.stride) {
    for (int64_t at = 0; at < kWidth; at += kLanes) {
      const Capped c = capped(hn::Load(kFloats, scores.at + at), softcap);
      hn::Store(c.score, kFloats, scores.at + at);
      if (slopes.at) hn::Store(c.slope, kFloats, slopes.at + n * slopes.stride + at);
    }
  }
}

/// Adds the biases of ALiBi to the scores of a panel. Lanes past the sequence's end get the last position's.
inline void add_biases(const Problem& p, const PanelPlace& place, int64_t count, Rows scores) {
  const Alibi alibi(p, place.b, place.h);
  const auto row = [&](int64_t n) { return alibi.row(std::min(place.row + n, p.seqlen_q - 1)); };
  const auto key = [&](int64_t n) { return alibi.key(std::min(place.key + n, p.seqlen_k - 1)); };
  int64_t lanes[kWidth];
  for (int64_t at = 0; at < kWidth; ++at) lanes[at] = place.lanes_are_keys ? key(at) : row(at);
  const auto slope = static_cast<float>(alibi.slope());
  for (int64_t n = 0; n < count; ++n, scores.at += scores.stride) {
    const int64_t other = place.lanes_are_keys ? row(n) : key(n);
    for (int64_t at = 0; at < kWidth; ++at) scores.at[at] -= slope * static_cast<float>(std::abs(lanes[at] - other));
  }
}

/// Turns the scaled products of a panel into scores, in place; the derivatives, if there are any, go to `slopes`, if
/// that is somewhere.
inline void transform_scores(const Problem& p, const PanelPlace& place, int64_t count, Rows scores, Rows slopes) {
  if (p.features.softcap != 0) cap_scores(static_cast<float>(p.features.softcap), count, scores, slopes);
  if (p.features.alibi_slopes.defined()) add_biases(p, place, count, scores);
}

}  // namespace flashmask::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // the toggle of FLASHMASK_BACKENDS_CPU_SCORES_INL_H_
