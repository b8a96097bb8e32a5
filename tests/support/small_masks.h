// SPDX-License-Identifier: Apache-2.0
#pragma once

// The exhaustive sets of small masks, in batches: each batch is one Mask with many heads, and the matrices
// that its heads must show, made without the library. For every folder that checks something on all of them.

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "common/random.h"
#include "flashmask/mask.h"
#include "support/independent_rule.h"
#include "support/random_masks.h"

namespace flashmask::test {

struct SmallMasks {
  Mask mask;                     ///< batch 1, one head for each small mask
  std::vector<uint8_t> visible;  ///< [heads, seqlen_q, seqlen_k], 1 = visible
};

/// Every band with edges within [-4, 4] or absent, lo <= hi: 64 of them, causal and all windows included.
inline std::vector<Band> small_bands() {
  std::vector<Band> bands;
  std::vector<std::optional<int64_t>> edges{std::nullopt};
  for (int64_t edge = -4; edge <= 4; ++edge) edges.push_back(edge);
  for (const auto& lo : edges) {
    for (const auto& hi : edges) {
      if (!lo || !hi || *lo <= *hi) bands.push_back({.lo = lo, .hi = hi});
    }
  }
  return bands;
}

/// The one or two runs of set bits of `hidden_rows` (bit i = row i), empty ones at row 0.
inline std::array<std::pair<int32_t, int32_t>, 2> runs_of(uint32_t hidden_rows, int rows) {
  std::array<std::pair<int32_t, int32_t>, 2> runs{};
  std::size_t n = 0;
  for (int32_t i = 0; i < rows;) {
    if (!(hidden_rows >> i & 1)) {
      ++i;
      continue;
    }
    const int32_t begin = i;
    while (i < rows && (hidden_rows >> i & 1)) ++i;
    runs.at(n++) = {begin, i};  // a third run throws
  }
  return runs;
}

/// Appends a column with these hidden rows to the four vectors. The runs take turns in which pair comes first:
/// the order means nothing.
inline void append_column(MaskParts& parts, uint32_t hidden_rows) {
  auto runs = runs_of(hidden_rows, static_cast<int>(parts.seqlen_q));
  if (parts.lts.size() % 2 != 0) std::swap(runs[0], runs[1]);
  parts.lts.push_back(runs[0].first);
  parts.lte.push_back(runs[0].second);
  parts.uts.push_back(runs[1].first);
  parts.ute.push_back(runs[1].second);
}

/// Clears what `band` hides in every matrix.
inline void apply_band(std::vector<uint8_t>& visible, const Band& band, int64_t seqlen_q, int64_t seqlen_k) {
  const std::vector<uint8_t> allowed = dense_by_rule({.seqlen_q = seqlen_q, .seqlen_k = seqlen_k, .band = band});
  for (std::size_t at = 0; at < visible.size(); ++at) visible[at] &= allowed[at % allowed.size()];
}

inline constexpr int64_t kMatrices4x4 = 65536;

/// 4x4 matrices first, first + step, ... (`count` of them; bit 4 * i + j of the number is element (i, j)) under
/// `band`. A column of four rows never has more than two hidden runs, so all fit.
inline SmallMasks masks_4x4(const Band& band, int64_t first = 0, int64_t count = kMatrices4x4, int64_t step = 1) {
  MaskParts parts{.seqlen_q = 4, .seqlen_k = 4, .band = band, .heads = count};
  std::vector<uint8_t> visible;
  visible.reserve(static_cast<std::size_t>(count * 16));
  for (int64_t n = 0; n < count; ++n) {
    const int64_t number = first + n * step;
    for (int bit = 0; bit < 16; ++bit) visible.push_back(number >> bit & 1);
    for (int j = 0; j < 4; ++j) {
      uint32_t hidden = 0;
      for (int i = 0; i < 4; ++i) hidden |= static_cast<uint32_t>(~number >> (4 * i + j) & 1) << i;
      append_column(parts, hidden);
    }
  }
  apply_band(visible, band, 4, 4);
  return {Mask(std::move(parts)), std::move(visible)};
}

/// The sets of 6 rows that at most two intervals hide: 57 of the 64.
inline std::vector<uint32_t> hidden_6_row_sets() {
  std::vector<uint32_t> sets;
  for (uint32_t set = 0; set < 64; ++set) {
    int runs = 0;
    for (int i = 0; i < 6; ++i) runs += (set >> i & 1) && !(i > 0 && (set >> (i - 1) & 1));
    if (runs <= 2) sets.push_back(set);
  }
  return sets;
}

inline constexpr int64_t kMasks6x3 = 57 * 57 * 57;

/// Masks of 6 rows and 3 columns, each column one of the 57 sets: numbers first, first + step, ... under `band`.
inline SmallMasks masks_6x3(const Band& band, int64_t first = 0, int64_t count = kMasks6x3, int64_t step = 1) {
  const std::vector<uint32_t> sets = hidden_6_row_sets();
  MaskParts parts{.seqlen_q = 6, .seqlen_k = 3, .band = band, .heads = count};
  std::vector<uint8_t> visible;
  visible.reserve(static_cast<std::size_t>(count * 18));
  for (int64_t n = 0; n < count; ++n) {
    const int64_t number = first + n * step;
    const std::array hidden{sets[static_cast<std::size_t>(number % 57)],
                            sets[static_cast<std::size_t>(number / 57 % 57)],
                            sets[static_cast<std::size_t>(number / 57 / 57)]};
    for (int i = 0; i < 6; ++i) {
      for (const uint32_t set : hidden) visible.push_back(!(set >> i & 1));
    }
    for (const uint32_t set : hidden) append_column(parts, set);
  }
  apply_band(visible, band, 6, 3);
  return {Mask(std::move(parts)), std::move(visible)};
}

inline constexpr int64_t kGroups6x6 = 1000, kHeads6x6 = 100;

/// 100,000 seeded 6x6 masks in 1,000 groups of 100 heads. A group shares its band, its q_offset and which of the
/// four vectors are there; their values are random, outside of [0, 6] included.
inline MaskParts parts_6x6(int64_t group) {
  Random random(0x6a6 + static_cast<uint64_t>(group));
  const ColumnKind kind = group % 3 == 0   ? ColumnKind::kSomeOfFour
                          : group % 3 == 1 ? ColumnKind::kFourBounds
                                           : random_kind(random);
  MaskParts parts = random_parts(random, kind, 6, 6, 1, kHeads6x6);
  // Without any vector the hundred would be one mask; an interval [6, 6) hides nothing and keeps them apart.
  if (parts.lts.empty() && parts.lte.empty()) parts.lts.assign(6 * kHeads6x6, 6);
  return parts;
}
inline SmallMasks masks_6x6(int64_t group) {
  const MaskParts parts = parts_6x6(group);
  return {Mask(parts), dense_by_rule(parts)};
}

}  // namespace flashmask::test
