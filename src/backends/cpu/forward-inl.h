// SPDX-License-Identifier: Apache-2.0

// The forward: row tiles over the key tiles that they see.

// Included by tile_kernels.cpp, once for each instruction set.
#if defined(FLASHMASK_BACKENDS_CPU_FORWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FLASHMASK_BACKENDS_CPU_FORWARD_INL_H_
#undef FLASHMASK_BACKENDS_CPU_FORWARD_INL_H_
#else
#define FLASHMASK_BACKENDS_CPU_FORWARD_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cmath>

#include "backends/cpu/masks-inl.h"
#include "backends/cpu/multiply-inl.h"
#include "backends/cpu/rows-inl.h"
#include "backends/cpu/scores-inl.h"
#include "backends/cpu/softmax-inl.h"
#include "call/sink_and_dropout.h"

HWY_BEFORE_NAMESPACE();
namespace flashmask::cpu::HWY_NAMESPACE {

struct ForwardScratch {
  Scratch parts;
  Rows k, v;
  float *q, *scores, *out, *largest, *sum;
  ElementMask *mask, *kept;

  ForwardScratch(const Problem& p, float* scratch) : parts(scratch) {
    constexpr int64_t kRows = kRowTilesAtOnce * kTileRows;
    k = {parts.take(kTileKeys * padded(p.head_dim)), padded(p.head_dim)};
    v = {parts.take(kTileKeys * padded(p.head_dim_v)), padded(p.head_dim_v)};
    q = parts.take(kRows * p.head_dim);
    scores = parts.take(kTileKeys * kWidth);
    out = parts.take(kRows * p.head_dim_v);
    largest = parts.take(kRows);
    sum = parts.take(kRows);
    mask = reinterpret_cast<ElementMask*>(parts.take(sizeof(ElementMask) / sizeof(float)));
    const bool has_dropout = p.features.dropout.p != 0;
    kept = has_dropout ? reinterpret_cast<ElementMask*>(parts.take(sizeof(ElementMask) / sizeof(float))) : mask;
  }
};

/// One panel of rows, from row0 of the rows at once, against one key tile: FlashMask's algorithm 1, lines 9 to 27.
/// `place` is the work tile's first row's and the key tile's.
void forward_panel(const Problem& p, const ForwardScratch& s, PanelPlace place, int64_t row0, int64_t keys, bool full,
                   bool drops) {
  float* out = s.out + row0 * p.head_dim_v;
  float* largest = s.largest + row0;
  float* sum = s.sum + row0;
  const Rows scores{s.scores, kWidth};
  multiply<Order::kRows>(keys, s.k, {s.q + row0 * p.head_dim, kWidth}, p.head_dim, false, scores);
  place.row += row0;
  transform_scores(p, place, keys, scores, {});
  if (!full) hide(RowLanes(*s.mask, row0 % kTileRows), keys, -kInf, scores);
  const Vec factor0 = softmax_half(s.scores, keys, largest, sum);
  const Vec factor1 = softmax_half(s.scores + kLanes, keys, largest + kLanes, sum + kLanes);
  rescale(factor0, factor1, p.head_dim_v, out);
  if (drops) hide(RowLanes(*s.kept, row0 % kTileRows), keys, 0.0f, scores);
  multiply<Order::kColumns>(p.head_dim_v, s.v, scores, keys, true, {out, kWidth});
}

/// lse of the rows, and s.sum becomes what their out is to be multiplied by.
void finish_softmax(const Problem& p, const ForwardScratch& s, int64_t b, int64_t h, int64_t row0, int64_t rows,
                    float dropout_scale) {
  const auto sink = static_cast<float>(sink_of(p, h));
  for (int64_t i = 0; i < rows; ++i) {
    const float largest = std::max(s.largest[i], sink);
    float& lse = static_cast<float*>(p.lse.data)[lse_offset(p.lse, b, h, row0 + i)];
    if (largest == -kInf) {
      lse = -kInf;
      s.sum[i] = 0.0f;
      continue;
    }
    float of_keys = 1.0f;
    if (sink != -kInf) {
      of_keys = std::exp(s.largest[i] - largest);
      s.sum[i] = s.sum[i] * of_keys + std::exp(sink - largest);
    }
    lse = largest + std::log(s.sum[i]);
    s.sum[i] = of_keys * dropout_scale / s.sum[i];
  }
}

int64_t forward_rows(const Problem& p, int64_t b, int64_t h, int64_t first, int64_t last, float* scratch) {
  const ForwardScratch s(p, scratch);
  const int64_t row0 = first * kTileRows, tile_rows = (last - first) * kTileRows,
                rows = std::min(tile_rows, p.seqlen_q - row0);
  for (int64_t from = 0; from < rows; from += kTileRows) {
    const int64_t count = std::min(kTileRows, rows - from);
    load_rows(p.q, b, row0 + from, count, h, p.scale(), s.k);
    make_panels(s.k, count, kTileRows, p.head_dim, s.q + from * p.head_dim);
  }
  std::fill(s.out, s.out + tile_rows * p.head_dim_v, 0.0f);
  std::fill(s.largest, s.largest + tile_rows, -kInf);
  std::fill(s.sum, s.sum + tile_rows, 0.0f);

  int64_t executed = 0;
  const MaskSource source(p, b, h);
  const DropoutSource dropout(p.features.dropout, b, h);
  const int64_t key_end = p.visible_extent(b).keys;
  const auto keys_of = [&](int64_t c) { return std::clamp(key_end - c * kTileKeys, int64_t{0}, kTileKeys); };
  const auto load_keys = [&](int64_t c) {
    load_rows(p.k, b, c * kTileKeys, keys_of(c), p.kv_head(h), 1.0f, s.k);
    load_rows(p.v, b, c * kTileKeys, keys_of(c), p.kv_head(h), 1.0f, s.v);
  };
  source.for_each_key_tile(first, last, load_keys, [&](int64_t r, int64_t c, bool full) {
    if (!full) source.load(r, c, *s.mask);
    if (dropout.drops()) load_kept(dropout, r, c, *s.kept);
    const int64_t begin = (r - first) * kTileRows, end = std::min(begin + kTileRows, rows);
    const PanelPlace place{b, h, row0, c * kTileKeys, false};
    for (int64_t row = begin; row < end; row += kWidth)
      forward_panel(p, s, place, row, keys_of(c), full, dropout.drops());
    ++executed;
  });

  finish_softmax(p, s, b, h, row0, rows, static_cast<float>(dropout.scale()));
  store_panels(s.out, rows, p.head_dim_v, s.sum, p.out, b, row0, h);
  return executed;
}

}  // namespace flashmask::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // the toggle of FLASHMASK_BACKENDS_CPU_FORWARD_INL_H_
