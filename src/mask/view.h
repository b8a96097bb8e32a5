// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>

#include "flashmask/mask.h"
#include "mask/rules.h"

namespace flashmask {

/// The index, along a dimension of `own` entries, that entry `index` of `all` reads (`own` divides `all`):
/// how one mask head serves several heads, and one key head several query heads.
constexpr int64_t broadcast_index(int64_t index, int64_t all, int64_t own) { return own == all ? index : index / (all / own); }

/// A band's edges on j - i with q_offset folded in, saturated: |j - i| < INT32_MAX always holds.
struct Diagonals {
  int32_t lo = INT32_MIN, hi = INT32_MAX;
};
inline Diagonals absolute_diagonals(const Band& band, int64_t q_offset) {
  const auto fold = [q_offset](int64_t edge) { return static_cast<int32_t>(std::clamp<int64_t>(edge + q_offset, INT32_MIN, INT32_MAX)); };
  Diagonals diagonals;
  if (band.lo) diagonals.lo = fold(*band.lo);
  if (band.hi) diagonals.hi = fold(*band.hi);
  return diagonals;
}

/// The vectors of mask batch entry `b` and mask head `h` (of view.batch() and view.heads()).
inline rules::Columns columns(const MaskView& view, int64_t b, int64_t h) {
  const int64_t at =
      (broadcast_index(b, view.batch(), view.bounds_batch) * view.bounds_heads + broadcast_index(h, view.heads(), view.bounds_heads)) *
      view.seqlen_k;
  const auto shifted = [at](const int32_t* p) { return p ? p + at : nullptr; };
  return {static_cast<int32_t>(view.seqlen_q),
          view.diagonal_lo,
          view.diagonal_hi,
          shifted(view.lts),
          shifted(view.lte),
          shifted(view.uts),
          shifted(view.ute)};
}

/// The block mask of that batch entry and head, or null.
inline const uint8_t* block_mask(const MaskView& view, int64_t b, int64_t h) {
  if (!view.block_mask) return nullptr;
  const int64_t blocks = ((view.seqlen_q + kBlockMaskSize - 1) / kBlockMaskSize) * ((view.seqlen_k + kBlockMaskSize - 1) / kBlockMaskSize);
  return view.block_mask +
         (broadcast_index(b, view.batch(), view.block_batch) * view.block_heads + broadcast_index(h, view.heads(), view.block_heads)) *
             blocks;
}

}  // namespace flashmask
