// SPDX-License-Identifier: Apache-2.0
#pragma once

// The rule 'does row i see key j', written a second time from the public contract (mask.h) and from nothing
// in src/, so that a wrong rule in the library cannot confirm itself.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "flashmask/mask.h"

namespace flashmask::test {

/// True if row `i` is in the rows [start, end) that a column is hidden from: raw values as the caller wrote
/// them, either vector possibly absent. Rows are never negative and never reach seqlen_q, so no value needs
/// clamping here.
inline bool in_interval(const std::vector<int32_t>& start, const std::vector<int32_t>& end, std::size_t column,
                        int64_t i) {
  if (start.empty() && end.empty()) return false;
  return (start.empty() || i >= start[column]) && (end.empty() || i < end[column]);
}

/// How far key j stands beyond row i: by positions, of batch entry `position`, or by indices.
inline int64_t distance_of(const MaskParts& mask, int64_t position, int64_t i, int64_t j) {
  if (mask.q_pos.empty() || mask.k_pos.empty()) return j - (i + mask.q_offset.value_or(mask.seqlen_k - mask.seqlen_q));
  return int64_t{mask.k_pos[static_cast<std::size_t>(position * mask.seqlen_k + j)]} -
         mask.q_pos[static_cast<std::size_t>(position * mask.seqlen_q + i)];
}

/// True if row `i` is in one of the intervals that the lists have for a column of [batch, head] `bounds`.
inline bool in_list(const MaskParts& mask, int64_t bounds, int64_t column, int64_t i) {
  if (mask.column_ptr.empty()) return false;
  const auto at = static_cast<std::size_t>(bounds * (mask.seqlen_k + 1) + column);
  for (int32_t n = mask.column_ptr[at]; n < mask.column_ptr[at + 1]; ++n) {
    const auto pair = static_cast<std::size_t>(n) * 2;
    if (mask.intervals[pair] <= i && i < mask.intervals[pair + 1]) return true;
  }
  return false;
}

/// The rule. `bounds` and `block` say which [batch, head] of the vectors and of the block mask is meant.
inline bool sees(const MaskParts& mask, int64_t bounds, int64_t block, int64_t position, int64_t i, int64_t j) {
  const int64_t distance = distance_of(mask, position, i, j);
  if (mask.band.lo && distance < *mask.band.lo) return false;
  if (mask.band.hi && distance > *mask.band.hi) return false;
  const auto column = static_cast<std::size_t>(bounds * mask.seqlen_k + j);
  if (in_interval(mask.lts, mask.lte, column, i) || in_interval(mask.uts, mask.ute, column, i)) return false;
  if (in_list(mask, bounds, j, i)) return false;
  if (mask.block_mask.empty()) return true;
  const int64_t block_rows = (mask.seqlen_q + 127) / 128, block_keys = (mask.seqlen_k + 127) / 128;
  return mask.block_mask[static_cast<std::size_t>((block * block_rows + i / 128) * block_keys + j / 128)] != 0;
}

/// 1 = visible: [batch, heads, seqlen_q, seqlen_k]. `batch` and `heads` are those of the call; 0 takes the
/// mask's own. Batch entries of the mask are broadcast from 1; a mask head serves heads / mask heads
/// consecutive heads.
inline std::vector<uint8_t> dense_by_rule(const MaskParts& mask, int64_t batch = 0, int64_t heads = 0) {
  const bool vectors =
      !mask.lts.empty() || !mask.lte.empty() || !mask.uts.empty() || !mask.ute.empty() || !mask.column_ptr.empty();
  const int64_t own_batch = vectors ? mask.batch : 1, own_heads = vectors ? mask.heads : 1;
  const int64_t block_batch = mask.block_mask.empty() ? 1 : mask.block_batch,
                block_heads = mask.block_mask.empty() ? 1 : mask.block_heads;
  const int64_t position_batch = mask.q_pos.empty() || mask.k_pos.empty() ? 1 : mask.position_batch;
  if (batch == 0) batch = std::max({own_batch, block_batch, position_batch});
  if (heads == 0) heads = std::max(own_heads, block_heads);
  const auto entry = [&](int64_t b, int64_t h, int64_t of_batch, int64_t of_heads) {
    return b * of_batch / batch * of_heads + h * of_heads / heads;
  };
  std::vector<uint8_t> visible;
  visible.reserve(static_cast<std::size_t>(batch * heads * mask.seqlen_q * mask.seqlen_k));
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < mask.seqlen_q; ++i)
        for (int64_t j = 0; j < mask.seqlen_k; ++j)
          visible.push_back(sees(mask, entry(b, h, own_batch, own_heads), entry(b, h, block_batch, block_heads),
                                 entry(b, h, position_batch, 1), i, j));
  return visible;
}

/// The raw values a Mask was given, for asking the rule above about a mask that a builder made.
inline MaskParts parts_of(const Mask& mask) {
  const auto copy = [](auto span) { return std::vector(span.begin(), span.end()); };
  const auto copies = [&](auto span, int64_t times) {
    std::vector<int32_t> all;
    for (int64_t n = 0; n < times; ++n) all.insert(all.end(), span.begin(), span.end());
    return all;
  };
  const MaskView& view = mask.view();
  const int64_t positions = std::max(view.q_pos_batch, view.k_pos_batch);
  return {.seqlen_q = mask.seqlen_q(),
          .seqlen_k = mask.seqlen_k(),
          .band = mask.band(),
          .q_offset = mask.has_positions() ? std::nullopt : std::optional(mask.q_offset()),
          .batch = view.bounds_batch,
          .heads = view.bounds_heads,
          .lts = copy(mask.lts()),
          .lte = copy(mask.lte()),
          .uts = copy(mask.uts()),
          .ute = copy(mask.ute()),
          .block_batch = view.block_batch,
          .block_heads = view.block_heads,
          .block_mask = copy(mask.block_mask()),
          .position_batch = positions,
          .q_pos = copies(mask.q_pos(), positions / view.q_pos_batch),
          .k_pos = copies(mask.k_pos(), positions / view.k_pos_batch),
          .column_ptr = copy(mask.column_ptr()),
          .intervals = copy(mask.intervals())};
}

}  // namespace flashmask::test
