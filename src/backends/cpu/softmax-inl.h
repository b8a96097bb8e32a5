// SPDX-License-Identifier: Apache-2.0

// exp, hidden elements, and the online softmax of a panel of scores.

// Included by tile_kernels.cpp, once for each instruction set.
#if defined(FLASHMASK_BACKENDS_CPU_SOFTMAX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FLASHMASK_BACKENDS_CPU_SOFTMAX_INL_H_
#undef FLASHMASK_BACKENDS_CPU_SOFTMAX_INL_H_
#else
#define FLASHMASK_BACKENDS_CPU_SOFTMAX_INL_H_
#endif

#include <hwy/highway.h>

#include <cstdint>

#include "backends/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace flashmask::cpu::HWY_NAMESPACE {

/// exp(x) of x <= 88, 0 below -87, NaN of NaN: 2^n * e^r with |r| <= ln 2 / 2 and e^r a polynomial within 4e-9.
/// Highway's own reaches down to the subnormal numbers, at twice the instructions, and turns NaN into 0.
HWY_INLINE Vec exp_up_to_88(Vec x) {
  // 1.5 * 2^23 rounds to an integer; 127 more, and the low bits are the exponent of 2^n.
  const Vec shift = hn::Set(kFloats, 12582912.0f + 127.0f);
  const Vec shifted = hn::MulAdd(x, hn::Set(kFloats, 1.44269504f), shift);
  const Vec n = hn::Sub(shifted, shift);
  // ln 2 in two parts: n times the first is exact.
  const Vec r =
      hn::NegMulAdd(n, hn::Set(kFloats, -2.12194440e-4f), hn::NegMulAdd(n, hn::Set(kFloats, 0.693359375f), x));
  Vec e = hn::MulAdd(r, hn::Set(kFloats, 0.0013814539f), hn::Set(kFloats, 0.0083687454f));
  e = hn::MulAdd(r, e, hn::Set(kFloats, 0.041668389f));
  e = hn::MulAdd(r, e, hn::Set(kFloats, 0.16666521f));
  e = hn::MulAdd(r, e, hn::Set(kFloats, 0.49999994f));
  const Vec one = hn::Set(kFloats, 1.0f);
  e = hn::MulAdd(r, hn::MulAdd(r, e, one), one);
  const Vec power = hn::BitCast(kFloats, hn::ShiftLeft<23>(hn::BitCast(kWords, shifted)));
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(kFloats, -87.0f)), hn::Mul(e, power));
}

/// exp(x) for any x: a caller's lse can be far below the scores.
HWY_INLINE Vec exp_any(Vec x) {
  return hn::IfThenElse(hn::Gt(x, hn::Set(kFloats, 88.0f)), hn::Set(kFloats, kInf), exp_up_to_88(x));
}

/// Replaces what `lanes` hides of a panel by `value`.
template <typename Lanes>
void hide(const Lanes& lanes, int64_t count, float value, Rows panel) {
  const Vec hidden = hn::Set(kFloats, value);
  for (int64_t n = 0; n < count; ++n, panel.at += panel.stride) {
    hn::Store(hn::IfThenElse(lanes.mask0(n), hn::Load(kFloats, panel.at), hidden), kFloats, panel.at);
    hn::Store(hn::IfThenElse(lanes.mask1(n), hn::Load(kFloats, panel.at + kLanes), hidden), kFloats, panel.at + kLanes);
  }
}

/// One half (a vector of rows) of the online softmax over a panel of scores [keys][kWidth], in place: scores
/// become probabilities relative to the running maximum. Returns the factor for what was summed up before.
HWY_INLINE Vec softmax_half(float* panel, int64_t keys, float* running_max, float* running_sum) {
  const Vec before = hn::Load(kFloats, running_max);
  Vec largest0 = before, largest1 = before, largest2 = before, largest3 = before;
  int64_t j = 0;
  for (; j + 4 <= keys; j += 4) {
    largest0 = hn::Max(largest0, hn::Load(kFloats, panel + j * kWidth));
    largest1 = hn::Max(largest1, hn::Load(kFloats, panel + (j + 1) * kWidth));
    largest2 = hn::Max(largest2, hn::Load(kFloats, panel + (j + 2) * kWidth));
    largest3 = hn::Max(largest3, hn::Load(kFloats, panel + (j + 3) * kWidth));
  }
  for (; j < keys; ++j) largest0 = hn::Max(largest0, hn::Load(kFloats, panel + j * kWidth));
  const Vec largest = hn::Max(hn::Max(largest0, largest1), hn::Max(largest2, largest3));
  // A row that has seen nothing yet subtracts 0, so that its hidden scores stay -inf.
  const Vec reference = hn::IfThenElseZero(hn::Ne(largest, hn::Set(kFloats, -kInf)), largest);
  Vec sum0 = hn::Zero(kFloats), sum1 = hn::Zero(kFloats);
  const auto to_probability = [&](int64_t key) {
    const Vec p = exp_up_to_88(hn::Sub(hn::Load(kFloats, panel + key * kWidth), reference));
    hn::Store(p, kFloats, panel + key * kWidth);
    return p;
  };
  for (j = 0; j + 2 <= keys; j += 2) {
    sum0 = hn::Add(sum0, to_probability(j));
    sum1 = hn::Add(sum1, to_probability(j + 1));
  }
  if (j < keys) sum0 = hn::Add(sum0, to_probability(j));
  // Exactly 1 for a row whose maximum stays, whatever its neighbours do.
  const Vec factor =
      hn::IfThenElse(hn::Eq(before, largest), hn::Set(kFloats, 1.0f), exp_up_to_88(hn::Sub(before, reference)));
  hn::Store(largest, kFloats, running_max);
  hn::Store(hn::MulAdd(hn::Load(kFloats, running_sum), factor, hn::Add(sum0, sum1)), kFloats, running_sum);
  return factor;
}

inline void rescale(Vec factor0, Vec factor1, int64_t dim, float* panel) {
  const Vec one = hn::Set(kFloats, 1.0f);
  if (hn::AllTrue(kFloats, hn::And(hn::Eq(factor0, one), hn::Eq(factor1, one)))) return;
  for (int64_t c = 0; c < dim; ++c, panel += kWidth) {
    hn::Store(hn::Mul(hn::Load(kFloats, panel), factor0), kFloats, panel);
    hn::Store(hn::Mul(hn::Load(kFloats, panel + kLanes), factor1), kFloats, panel + kLanes);
  }
}

}  // namespace flashmask::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // the toggle of FLASHMASK_BACKENDS_CPU_SOFTMAX_INL_H_
