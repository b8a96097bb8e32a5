// SPDX-License-Identifier: Apache-2.0

// The forward with split_size: rows of one query head over the plan's tiles, with the arithmetic of calls over caches.

// Included by cached_kernels.cpp, once for each instruction set.
#if defined(FLASHMASK_BACKENDS_CPU_SPLIT_FORWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FLASHMASK_BACKENDS_CPU_SPLIT_FORWARD_INL_H_
#undef FLASHMASK_BACKENDS_CPU_SPLIT_FORWARD_INL_H_
#else
#define FLASHMASK_BACKENDS_CPU_SPLIT_FORWARD_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstdint>

#include "backends/cpu/cached-inl.h"
#include "backends/cpu/masks-inl.h"

HWY_BEFORE_NAMESPACE();
namespace flashmask::cpu::HWY_NAMESPACE {

/// Sets bits[i] to which of the keys [key0, key0 + kCachedKeys) row i of a tile sees.
HWY_FLATTEN inline void transpose_mask(const ElementMask& mask, int64_t key0, uint64_t (&bits)[kTileRows]) {
  static_assert(kTileRows <= PackedRows::kMost && kTileKeys % kCachedKeys == 0);
  for (int64_t i = 0; i < kTileRows; ++i) {
    const uint32_t* const keys = mask.rows[i / 32] + key0;
    bits[i] = 0;
    for (int64_t j = 0; j < kCachedKeys; ++j) bits[i] |= static_cast<uint64_t>(keys[j] >> i % 32 & 1) << j;
  }
}

/// The tiles that rows of one query head, a row tile of the plan, see: live tiles of the plan in halves. Walks through
/// all splits of a row, ascending.
class PlannedTiles {
 public:
  PlannedTiles(const Problem& forward, const CachedProblem& p, const Sequence& sequence, const PackedRows& rows,
               ElementMask& mask)
      : p_(p),
        sequence_(sequence),
        rows_(rows),
        source_(forward, rows.b, rows.head(0)),
        mask_(mask),
        row_tile_(rows.first / kTileRows),
        key_end_(forward.visible_extent(rows.b).keys) {
    begin_tile(0);
  }

  /// Begins the next split, which ends before key `end`.
  void begin_split(int64_t end) { end_ = std::min(end, key_end_); }
  /// Sets the next one; false if the split has none.
  bool next(VisibleTile& tile) {
    while (next_ < end_) {
      const int64_t first = next_;
      const bool sees = load(first, tile);
      next_ += kCachedKeys;
      if (next_ % kTileKeys == 0) begin_tile(next_ / kTileKeys);
      if (sees) return true;
    }
    return false;
  }
  const uint64_t* bits(const VisibleTile& tile, int64_t) const { return tile.bits; }
  /// Tiles of the plan that were begun.
  int64_t executed() const { return executed_; }

 private:
  /// Goes to the first live tile of the plan from key tile c on.
  void begin_tile(int64_t c) {
    const int64_t live = source_.next_key_tile(row_tile_, c);
    next_ = live * kTileKeys;
    if (next_ >= key_end_) return;
    ++executed_;
    is_full_ = source_.is_full(row_tile_, live);
    if (!is_full_) source_.load(row_tile_, live, mask_);
  }
  bool load(int64_t first, VisibleTile& tile) const {
    tile.tile = KeyTile(sequence_, first, key_end_);
    if (is_full_)
      std::fill_n(tile.bits, kTileRows, rules::low_bits(static_cast<int32_t>(tile.tile.count)));
    else
      transpose_mask(mask_, first % kTileKeys, tile.bits);
    uint64_t any = 0;
    for (int64_t i = 0; i < rows_.count; ++i) any |= tile.bits[i];
    if (!any) return false;
    tile.heads = 1;
    tile.k = StoredKeys(p_.cache.k, tile.tile, rows_.hk);
    tile.v = StoredKeys(p_.cache.v, tile.tile, rows_.hk);
    return true;
  }

  const CachedProblem& p_;
  const Sequence& sequence_;
  const PackedRows& rows_;
  const MaskSource source_;
  ElementMask& mask_;
  int64_t row_tile_, key_end_, next_ = 0, end_ = 0, executed_ = 0;
  bool is_full_ = false;
};

struct SplitForwardScratch {
  Scratch parts;
  float *split, *sum, *part;  ///< split_softmax's, and the states of all splits and of one
  ElementMask* mask;

  SplitForwardScratch(const CachedProblem& p, float* scratch) : parts(scratch) {
    split = parts.take(cached_scratch_floats(p));
    sum = parts.take(kTileRows * SoftmaxState::floats_per_row(p.head_dim_v));
    part = parts.take(kTileRows * SoftmaxState::floats_per_row(p.head_dim_v));
    mask = reinterpret_cast<ElementMask*>(parts.take(sizeof(ElementMask) / sizeof(float)));
  }
};

int64_t split_forward_rows(const Problem& forward, const CachedProblem& p, int64_t b, int64_t h, int64_t r,
                           float* scratch) {
  const SplitForwardScratch s(p, scratch);
  const int64_t first = r * kTileRows, count = std::min(kTileRows, forward.seqlen_q - first);
  const PackedRows rows{b, forward.kv_head(h), 1, first, count, 1, h};
  // The rows are a sequence's from q_offset on.
  const Sequence sequence(p, b, {{0, forward.seqlen_q}, 0, forward.mask.q_offset + forward.seqlen_q, 0});
  PlannedTiles tiles(forward, p, sequence, rows, *s.mask);
  const SoftmaxState sum = SoftmaxState::in(s.sum, count, p.head_dim_v),
                     part = SoftmaxState::in(s.part, count, p.head_dim_v);
  sum.clear(count);
  for (int64_t begin = 0; begin < forward.seqlen_k; begin += p.split_size) {
    tiles.begin_split(begin + p.split_size);
    split_softmax(p, sequence, rows, tiles, part, s.split);
    HWY_NAMESPACE::fold_state(sum, part, count, p.head_dim_v);
  }
  store_rows(p, sequence, rows, sum);
  return tiles.executed();
}

int64_t split_forward_scratch_floats(const CachedProblem& p) { return SplitForwardScratch(p, nullptr).parts.taken(); }

}  // namespace flashmask::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // the toggle of FLASHMASK_BACKENDS_CPU_SPLIT_FORWARD_INL_H_
