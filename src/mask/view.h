// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>

#include "flashmask/mask.h"
#include "mask/column_rows.h"
#include "mask/rules.h"

namespace flashmask {

/// How many neighbours of `all` entries share one of `own` (`own` divides `all`): one mask head serves several heads,
/// and one key head several query heads.
constexpr int64_t broadcast_group(int64_t all, int64_t own) { return own == all ? 1 : all / own; }

/// The index, along a dimension of `own` entries, that entry `index` of `all` reads.
constexpr int64_t broadcast_index(int64_t index, int64_t all, int64_t own) { return index / broadcast_group(all, own); }

/// A band's edges on j - i with q_offset folded in, saturated: |j - i| < INT32_MAX always holds.
struct Diagonals {
  int32_t lo = INT32_MIN, hi = INT32_MAX;
};
inline Diagonals absolute_diagonals(const Band& band, int64_t q_offset) {
  const auto fold = [q_offset](int64_t edge) {
    return static_cast<int32_t>(std::clamp<int64_t>(edge + q_offset, INT32_MIN, INT32_MAX));
  };
  Diagonals diagonals;
  if (band.lo) diagonals.lo = fold(*band.lo);
  if (band.hi) diagonals.hi = fold(*band.hi);
  return diagonals;
}

// A View is a MaskView or, on a device, the part of one that is passed on.

/// First column of vectors `own`, one of bounds_batch * bounds_heads.
template <typename View>
FLASHMASK_RULE int64_t first_column(const View& view, int64_t own) {
  return own * view.seqlen_k;
}

/// The vectors number `own`, with the diagonals of the view.
template <typename View>
FLASHMASK_RULE rules::Columns own_columns(const View& view, int64_t own) {
  const int64_t at = first_column(view, own) * view.bounds_stride;
  return {static_cast<int32_t>(view.seqlen_q),
          view.diagonal_lo,
          view.diagonal_hi,
          view.lts ? view.lts + at : nullptr,
          view.lte ? view.lte + at : nullptr,
          view.uts ? view.uts + at : nullptr,
          view.ute ? view.ute + at : nullptr,
          view.bounds_stride};
}

/// First element of block mask `own`, one of block_batch * block_heads.
template <typename View>
FLASHMASK_RULE int64_t first_block(const View& view, int64_t own) {
  return own * ((view.seqlen_q + kBlockMaskSize - 1) / kBlockMaskSize) *
         ((view.seqlen_k + kBlockMaskSize - 1) / kBlockMaskSize);
}

/// The vectors of mask batch entry `b` and mask head `h` (of view.batch() and view.heads()), with the band unless that
/// is over positions.
inline rules::Columns columns(const MaskView& view, int64_t b, int64_t h) {
  rules::Columns own = own_columns(view, broadcast_index(b, view.batch(), view.bounds_batch) * view.bounds_heads +
                                             broadcast_index(h, view.heads(), view.bounds_heads));
  if (view.has_positions) own.diagonal_lo = INT32_MIN, own.diagonal_hi = INT32_MAX;
  return own;
}

/// The hidden rows of columns(view, b, h), interval lists included.
inline ColumnRows column_rows(const MaskView& view, int64_t b, int64_t h) {
  const rules::Columns own = columns(view, b, h);
  if (!view.column_ptr) return own;
  const int64_t list = broadcast_index(b, view.batch(), view.bounds_batch) * view.bounds_heads +
                       broadcast_index(h, view.heads(), view.bounds_heads);
  return {own, view.column_ptr + list * (view.seqlen_k + 1), view.intervals};
}

/// True if there is a band and it compares positions.
inline bool compares_positions(const MaskView& view) {
  return view.has_positions && (view.diagonal_lo != INT32_MIN || view.diagonal_hi != INT32_MAX);
}

/// The band over positions of mask batch entry `b`; one without positions if the mask has none.
inline rules::PositionBand position_band(const MaskView& view, int64_t b) {
  if (!compares_positions(view)) return {};
  return {view.diagonal_lo, view.diagonal_hi,
          view.q_pos + broadcast_index(b, view.batch(), view.q_pos_batch) * view.seqlen_q,
          view.k_pos + broadcast_index(b, view.batch(), view.k_pos_batch) * view.seqlen_k};
}

/// The block mask of that batch entry and head, or null.
inline const uint8_t* block_mask(const MaskView& view, int64_t b, int64_t h) {
  if (!view.block_mask) return nullptr;
  return view.block_mask + first_block(view, broadcast_index(b, view.batch(), view.block_batch) * view.block_heads +
                                                 broadcast_index(h, view.heads(), view.block_heads));
}

/// True if row `i` of this batch entry and head sees key `j`.
inline bool is_visible(const MaskView& view, int64_t b, int64_t h, int64_t i, int64_t j) {
  if (!column_rows(view, b, h).is_visible(static_cast<int32_t>(i), static_cast<int32_t>(j))) return false;
  const rules::PositionBand band = position_band(view, b);
  if (band.q_pos && !rules::in_band(band, band.q_pos[i], band.k_pos[j])) return false;
  const uint8_t* keep = block_mask(view, b, h);
  const int64_t key_blocks = (view.seqlen_k + kBlockMaskSize - 1) / kBlockMaskSize;
  return !keep || keep[i / kBlockMaskSize * key_blocks + j / kBlockMaskSize] != 0;
}

}  // namespace flashmask
