// SPDX-License-Identifier: Apache-2.0

// The backward: key tiles over the row tiles that see them, and dq, to which they add in turn.

// Included by tile_kernels.cpp, once for each instruction set.
#if defined(FLASHMASK_BACKENDS_CPU_BACKWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FLASHMASK_BACKENDS_CPU_BACKWARD_INL_H_
#undef FLASHMASK_BACKENDS_CPU_BACKWARD_INL_H_
#else
#define FLASHMASK_BACKENDS_CPU_BACKWARD_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <atomic>

#include "backends/cpu/masks-inl.h"
#include "backends/cpu/multiply-inl.h"
#include "backends/cpu/rows-inl.h"
#include "backends/cpu/scores-inl.h"
#include "backends/cpu/softmax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace flashmask::cpu::HWY_NAMESPACE {

/// lse of a tile's rows. A row that sees nothing has lse -inf; 0 keeps exp(hidden score - lse) at 0.
void load_lse(const Problem& p, int64_t b, int64_t h, int64_t row0, int64_t rows, float* lse) {
  for (int64_t i = 0; i < rows; ++i) {
    const float x = static_cast<const float*>(p.lse.data)[lse_offset(p.lse, b, h, row0 + i)];
    lse[i] = x == -kInf ? 0.0f : x;
  }
}

struct BackwardScratch {
  Scratch parts;
  Rows k_rows, q, dout, scores, dprobs, slopes;
  float *k, *v, *dk, *dv, *lse, *factors;
  ElementMask *mask, *kept;

  BackwardScratch(const Problem& p, float* scratch) : parts(scratch) {
    const int64_t stride_k = padded(round_up(p.head_dim, kWidth));
    k_rows = {parts.take(kTileKeys * stride_k), stride_k};
    q = {parts.take(kTileRows * padded(p.head_dim)), padded(p.head_dim)};
    // V passes through here on its way to panels.
    dout = {parts.take(kTileKeys * padded(p.head_dim_v)), padded(p.head_dim_v)};
    scores = {parts.take(kTileRows * padded(kTileKeys)), padded(kTileKeys)};
    dprobs = {parts.take(kTileRows * padded(kTileKeys)), padded(kTileKeys)};
    slopes = {parts.take(has_slopes(p) ? kTileRows * kWidth : 0), kWidth};
    k = parts.take(kTileKeys * p.head_dim);
    v = parts.take(kTileKeys * p.head_dim_v);
    dk = parts.take(kTileKeys * p.head_dim);
    dv = parts.take(kTileKeys * p.head_dim_v);
    lse = parts.take(kTileRows);
    factors = parts.take(kTileKeys);
    mask = reinterpret_cast<ElementMask*>(parts.take(sizeof(ElementMask) / sizeof(float)));
    const bool has_dropout = p.features.dropout.p != 0;
    kept = has_dropout ? reinterpret_cast<ElementMask*>(parts.take(sizeof(ElementMask) / sizeof(float))) : mask;
  }
};

/// delta is summed in the order and with the operations of the product dP = dO V^T: a row that sees a single key has
/// out = v, so dP - delta is exactly 0 there.
void prepare_backward(const Problem& p, const BackwardRows& shared, int64_t b, int64_t h, int64_t r, float* scratch) {
  const BackwardScratch s(p, scratch);
  const int64_t row0 = r * kTileRows, rows = std::min(kTileRows, p.seqlen_q - row0);
  load_rows(p.out, b, row0, rows, h, 1.0f, s.dout);
  make_panels(s.dout, rows, kTileRows, p.head_dim_v, s.v);
  const int64_t visible = std::clamp(p.visible_extent(b).rows - row0, int64_t{0}, rows);
  load_rows(p.dout, b, row0, visible, h, 1.0f, s.dout);
  make_panels(s.dout, visible, kTileRows, p.head_dim_v, s.dv);
  for (int64_t lane = 0; lane < kTileRows; lane += kLanes) {
    const int64_t at = lane / kWidth * p.head_dim_v * kWidth + lane % kWidth;
    Vec sum = hn::Zero(kFloats);
    for (int64_t c = 0; c < p.head_dim_v; ++c) {
      sum = hn::MulAdd(hn::Load(kFloats, s.v + at + c * kWidth), hn::Load(kFloats, s.dv + at + c * kWidth), sum);
    }
    hn::Store(sum, kFloats, s.lse + lane);
  }
  float* delta = shared.delta_of(p, b, h, r);
  for (int64_t i = 0; i < rows; ++i) {
    delta[i] = s.lse[i];
    if (p.dlse.defined()) delta[i] -= static_cast<const float*>(p.dlse.data)[lse_offset(p.dlse, b, h, row0 + i)];
  }
  const int64_t stride = BackwardRows::dq_stride(p), columns = round_up(p.head_dim, kWidth);
  for (int64_t i = 0; i < rows; ++i) std::fill_n(shared.dq_of(p, b, h, r) + i * stride, columns, 0.0f);
  *shared.turn_of(p, b, h, r) = static_cast<int32_t>(MaskSource(p, b, h).next_key_tile(r, 0));
}

/// scores become P = exp(scores - lse), dprobs become P * (dP - delta), over a panel whose lanes are keys.
void compute_probabilities(const float* lse, const float* delta, int64_t rows, Rows scores, Rows dprobs) {
  for (int64_t i = 0; i < rows; ++i, scores.at += scores.stride, dprobs.at += dprobs.stride) {
    const Vec row_lse = hn::Set(kFloats, lse[i]), row_delta = hn::Set(kFloats, delta[i]);
    for (int64_t at = 0; at < kWidth; at += kLanes) {
      const Vec p = exp_any(hn::Sub(hn::Load(kFloats, scores.at + at), row_lse));
      hn::Store(p, kFloats, scores.at + at);
      hn::Store(hn::Mul(p, hn::Sub(hn::Load(kFloats, dprobs.at + at), row_delta)), kFloats, dprobs.at + at);
    }
  }
}

/// A panel times another, element by element.
void multiply_elements(int64_t rows, Rows factors, Rows panel) {
  for (int64_t i = 0; i < rows; ++i, factors.at += factors.stride, panel.at += panel.stride) {
    for (int64_t at = 0; at < kWidth; at += kLanes) {
      hn::Store(hn::Mul(hn::Load(kFloats, panel.at + at), hn::Load(kFloats, factors.at + at)), kFloats, panel.at + at);
    }
  }
}

/// One panel of keys against one row tile: FlashMask's algorithm 2, lines 12 to 28, without dq.
/// `place` is the tile's.
void backward_panel(const Problem& p, const BackwardScratch& s, PanelPlace place, const float* delta, int64_t key0,
                    int64_t rows, bool full, bool drops) {
  const Rows scores = s.scores.columns_from(key0), dprobs = s.dprobs.columns_from(key0);
  multiply<Order::kRows>(rows, s.q, {s.k + key0 * p.head_dim, kWidth}, p.head_dim, false, scores);
  multiply<Order::kRows>(rows, s.dout, {s.v + key0 * p.head_dim_v, kWidth}, p.head_dim_v, false, dprobs);
  const KeyLanes lanes{*s.mask, key0}, kept{*s.kept, key0};
  if (drops) hide(kept, rows, 0.0f, dprobs);
  place.key += key0;
  transform_scores(p, place, rows, scores, s.slopes);
  if (!full) hide(lanes, rows, -kInf, scores);
  compute_probabilities(s.lse, delta, rows, scores, dprobs);
  if (has_slopes(p)) multiply_elements(rows, s.slopes, dprobs);
  // Hidden again: 0 times a non-finite dP must not get through.
  if (!full) hide(lanes, rows, 0.0f, dprobs);
  if (drops) hide(kept, rows, 0.0f, scores);
  multiply<Order::kColumns>(p.head_dim_v, s.dout, scores, rows, true, {s.dv + key0 * p.head_dim_v, kWidth});
  multiply<Order::kColumns>(p.head_dim, s.q, dprobs, rows, true, {s.dk + key0 * p.head_dim, kWidth});
}

/// dq of a row tile += dS K, when the key tiles before c have added theirs: with any threads the same order, the same
/// bits. A thread does its key tiles in ascending order, so the least unfinished one never waits.
void add_to_dq(const Problem& p, const BackwardScratch& s, Rows dq, std::atomic_ref<int32_t> turn, int64_t rows,
               int64_t keys, int64_t c, int64_t next) {
  for (int32_t now = turn.load(std::memory_order_acquire); now != c; now = turn.load(std::memory_order_acquire))
    turn.wait(now);
  for (int64_t at = 0; at < p.head_dim; at += kWidth) {
    multiply<Order::kRows>(rows, s.dprobs, s.k_rows.columns_from(at), keys, true, dq.columns_from(at));
  }
  turn.store(static_cast<int32_t>(next), std::memory_order_release);
  turn.notify_all();
}

int64_t backward_keys(const Problem& p, const BackwardRows& shared, int64_t b, int64_t hk, int64_t c, float* scratch) {
  const BackwardScratch s(p, scratch);
  const VisibleExtent extent = p.visible_extent(b);
  const int64_t key0 = c * kTileKeys, keys = std::clamp(extent.keys - key0, int64_t{0}, kTileKeys);
  std::fill(s.k_rows.at, s.k_rows.at + kTileKeys * s.k_rows.stride, 0.0f);  // the columns past the last are read
  load_rows(p.k, b, key0, keys, hk, 1.0f, s.k_rows);
  make_panels(s.k_rows, keys, kTileKeys, p.head_dim, s.k);
  // Scaled as out has been, so that dP - delta still is exactly 0 where a row sees a single key; dv is at the end.
  const auto dropout_scale = static_cast<float>(DropoutSource(p.features.dropout, b, hk).scale());
  load_rows(p.v, b, key0, keys, hk, dropout_scale, s.dout);
  make_panels(s.dout, keys, kTileKeys, p.head_dim_v, s.v);
  std::fill(s.dk, s.dk + kTileKeys * p.head_dim, 0.0f);
  std::fill(s.dv, s.dv + kTileKeys * p.head_dim_v, 0.0f);

  int64_t executed = 0;
  for (int64_t h = hk * p.group_size(); h < (hk + 1) * p.group_size(); ++h) {
    const MaskSource source(p, b, h);
    const DropoutSource dropout(p.features.dropout, b, h);
    source.for_each_row_tile(c, [&](int64_t r, bool full) {
      const int64_t row0 = r * kTileRows, rows = std::clamp(extent.rows - row0, int64_t{0}, kTileRows);
      load_rows(p.q, b, row0, rows, h, p.scale(), s.q);
      load_rows(p.dout, b, row0, rows, h, 1.0f, s.dout);
      load_lse(p, b, h, row0, rows, s.lse);
      if (!full) source.load(r, c, *s.mask);
      if (dropout.drops()) load_kept(dropout, r, c, *s.kept);
      for (int64_t key = 0; key < keys; key += kWidth)
        backward_panel(p, s, {b, h, row0, key0, true}, shared.delta_of(p, b, h, r), key, rows, full, dropout.drops());
      add_to_dq(p, s, {shared.dq_of(p, b, h, r), BackwardRows::dq_stride(p)},
                std::atomic_ref<int32_t>(*shared.turn_of(p, b, h, r)), rows, keys, c, source.next_key_tile(r, c + 1));
      ++executed;
    });
  }
  const int64_t stored = std::min(kTileKeys, p.seqlen_k - key0);
  std::fill(s.factors, s.factors + kTileKeys, 1.0f);
  store_panels(s.dk, stored, p.head_dim, s.factors, p.dk, b, key0, hk);
  std::fill(s.factors, s.factors + kTileKeys, dropout_scale);
  store_panels(s.dv, stored, p.head_dim_v, s.factors, p.dv, b, key0, hk);
  return executed;
}

void store_dq(const Problem& p, const BackwardRows& shared, int64_t b, int64_t h, int64_t r) {
  const int64_t row0 = r * kTileRows, rows = std::min(kTileRows, p.seqlen_q - row0);
  const float scale = p.scale();
  for (int64_t i = 0; i < rows; ++i) {
    float* row = shared.dq_of(p, b, h, r) + i * BackwardRows::dq_stride(p);
    for (int64_t at = 0; at < p.head_dim; ++at) row[at] *= scale;
    if (!BackwardRows::sums_in_dq(p)) store_row(row, p.head_dim, p.dq, b, row0 + i, h);
  }
}

}  // namespace flashmask::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // the toggle of FLASHMASK_BACKENDS_CPU_BACKWARD_INL_H_
