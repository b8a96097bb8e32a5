// SPDX-License-Identifier: Apache-2.0

// Scores of packed rows over a tile of keys: scale, softcap, ALiBi, mask, and their softmax.

// Included by cached_kernels.cpp, once for each instruction set.
#if defined(FLASHMASK_BACKENDS_CPU_SCORE_TERMS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FLASHMASK_BACKENDS_CPU_SCORE_TERMS_INL_H_
#undef FLASHMASK_BACKENDS_CPU_SCORE_TERMS_INL_H_
#else
#define FLASHMASK_BACKENDS_CPU_SCORE_TERMS_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>

#include "backends/cpu/cached_kernels.h"
#include "backends/cpu/scores-inl.h"
#include "backends/cpu/softmax-inl.h"
#include "backends/cpu/stored_keys-inl.h"
#include "cache/visible_keys.h"
#include "call/alibi.h"

HWY_BEFORE_NAMESPACE();
namespace flashmask::cpu::HWY_NAMESPACE {

HWY_INLINE float sum_of(Vec x) { return hn::GetLane(hn::SumOfLanes(kFloats, x)); }

/// Lanes of the bits from j on.
HWY_INLINE auto lanes_of(uint64_t bits, int64_t j) {
  const auto word = hn::Set(kWords, static_cast<uint32_t>(bits >> j));
  return hn::RebindMask(kFloats, hn::TestBit(word, hn::Shl(hn::Set(kWords, 1u), hn::Iota(kWords, 0u))));
}

/// Terms that turn products into scores, and the mask.
class ScoreTerms {
 public:
  ScoreTerms(const CachedProblem& p, const Sequence& sequence, const PackedRows& rows)
      : p_(p), sequence_(sequence), rows_(rows) {}

  /// Reads what differs by key of a tile for a key head.
  void load(const KeyTile& tile, int64_t hk) {
    hk_ = hk;
    load_scale(p_.cache.k_scale, tile, k_scale_);
    load_scale(p_.cache.v_scale, tile, v_scale_);
    if (!p_.features.alibi_slopes.defined()) return;
    for (int64_t n = 0; n < tile.count; ++n)
      position_[n] = sequence_.key_position(tile.first + n, tile.at[static_cast<std::size_t>(n)]);
    std::fill(position_ + tile.count, position_ + kCachedKeys, 0);
  }

  /// Scores of row n of the packed ones, in place; hidden ones are -inf.
  HWY_INLINE void transform(int64_t n, uint64_t visible, float* scores) const {
    const auto softcap = static_cast<float>(p_.features.softcap);
    alignas(64) float bias[kCachedKeys];
    const bool has_bias = p_.features.alibi_slopes.defined();
    if (has_bias) load_bias(n, bias);
    const auto hidden = hn::Set(kFloats, -kInf);
    for (int64_t j = 0; j < kCachedKeys; j += kLanes) {
      Vec score = hn::Load(kFloats, scores + j);
      if (p_.cache.k_scale.defined()) score = hn::Mul(score, hn::Load(kFloats, k_scale_ + j));
      if (softcap != 0) score = capped(score, softcap).score;
      if (has_bias) score = hn::Sub(score, hn::Load(kFloats, bias + j));
      hn::Store(hn::IfThenElse(lanes_of(visible, j), score, hidden), kFloats, scores + j);
    }
  }

  /// Weights become those of stored values.
  HWY_INLINE void scale_weights(float* weights) const {
    if (!p_.cache.v_scale.defined()) return;
    for (int64_t j = 0; j < kCachedKeys; j += kLanes)
      hn::Store(hn::Mul(hn::Load(kFloats, weights + j), hn::Load(kFloats, v_scale_ + j)), kFloats, weights + j);
  }

 private:
  void load_scale(const TensorView& scale, const KeyTile& tile, float* to) const {
    if (!scale.defined()) return;
    std::fill(to, to + kCachedKeys, 1.0f);
    for (int64_t n = 0; n < tile.count; ++n) {
      const KeyPlace& at = tile.at[static_cast<std::size_t>(n)];
      if (at.page >= 0)
        to[n] = static_cast<const float*>(
            scale.data)[at.page * scale.stride[0] + at.slot * scale.stride[1] + hk_ * scale.stride[2]];
    }
  }
  void load_bias(int64_t n, float* bias) const {
    const auto slope = static_cast<float>(alibi_slope(p_, rows_.b, rows_.head(n)));
    const int64_t position = sequence_.row_position(sequence_.first_row() + rows_.row(n));
    for (int64_t j = 0; j < kCachedKeys; ++j) bias[j] = slope * static_cast<float>(std::abs(position - position_[j]));
  }

  const CachedProblem& p_;
  const Sequence& sequence_;
  const PackedRows& rows_;
  int64_t hk_ = 0;
  alignas(64) float k_scale_[kCachedKeys] = {};
  alignas(64) float v_scale_[kCachedKeys] = {};
  int64_t position_[kCachedKeys] = {};
};

/// The largest lane of a vector without NaN. Highway's emulation begins with the lowest finite number, not with -inf.
HWY_INLINE float largest_lane(Vec x) {
  const float largest = hn::GetLane(hn::MaxOfLanes(kFloats, x));
  return HWY_TARGET == HWY_EMU128 && largest == hwy::LowestValue<float>() ? -kInf : largest;
}

/// The online softmax of a packed row over a tile: scores become weights. Returns the factor for what was summed up
/// before.
HWY_INLINE float softmax_row(float* scores, float& running_max, float& running_sum) {
  Vec most = hn::Load(kFloats, scores);
  for (int64_t j = kLanes; j < kCachedKeys; j += kLanes) most = hn::Max(most, hn::Load(kFloats, scores + j));
  const float before = running_max, largest = std::max(before, largest_lane(most));
  const Vec reference = hn::Set(kFloats, largest == -kInf ? 0.0f : largest);
  Vec sum = hn::Zero(kFloats);
  for (int64_t j = 0; j < kCachedKeys; j += kLanes) {
    const Vec weight = exp_up_to_88(hn::Sub(hn::Load(kFloats, scores + j), reference));
    hn::Store(weight, kFloats, scores + j);
    sum = hn::Add(sum, weight);
  }
  const float factor = before == largest ? 1.0f : std::exp(before - largest);
  running_max = largest;
  running_sum = running_sum * factor + sum_of(sum);
  return factor;
}

}  // namespace flashmask::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // the toggle of FLASHMASK_BACKENDS_CPU_SCORE_TERMS_INL_H_
