// SPDX-License-Identifier: Apache-2.0
#pragma once

// Seeded random masks of every kind that the contract allows, odd values included.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "common/random.h"
#include "flashmask/mask.h"

namespace flashmask::test {

/// Shapes of a random mask's row intervals.
enum class ColumnKind {
  kNone,          ///< no vectors
  kDocuments,     ///< runs of columns that share one LTS and one UTE
  kEviction,      ///< every column its own LTS
  kFourBounds,    ///< four random rows a column: overlapping, reversed, out of range
  kTwoRuns,       ///< two short hidden runs anywhere
  kSparseHoles,   ///< a short hidden run in a few columns, most of them wholly visible
  kAlmostHidden,  ///< only a short visible run in a few columns
  kSomeOfFour,    ///< a random choice of the four vectors is present
  kLists,  ///< interval lists of up to eight, in any order; a kind of mask of its own, so not among kAllColumnKinds
};
inline constexpr ColumnKind kAllColumnKinds[] = {
    ColumnKind::kNone,    ColumnKind::kDocuments,   ColumnKind::kEviction,     ColumnKind::kFourBounds,
    ColumnKind::kTwoRuns, ColumnKind::kSparseHoles, ColumnKind::kAlmostHidden, ColumnKind::kSomeOfFour};

/// One of: none, causal, window, an edge to either side at any distance, a band that lets nothing through.
inline Band random_band(Random& random, int64_t seqlen_q, int64_t seqlen_k) {
  const int64_t reach = seqlen_q + seqlen_k + 2;
  switch (random.integer(0, 7)) {
    case 0:
    case 1:
      return Band::none();
    case 2:
      return Band::causal();
    case 3:
      return Band::window(random.integer(-1, seqlen_k), 0);
    case 4:
      return Band::window(random.integer(-1, seqlen_k / 2 + 1), random.integer(-1, seqlen_k / 2 + 1));
    case 5:
      return {.lo = random.integer(-reach, reach), .hi = std::nullopt};
    case 6:
      return {.lo = std::nullopt, .hi = random.integer(-reach, reach)};
    default:
      return {.lo = random.integer(-reach, reach), .hi = random.integer(-reach, reach)};
  }
}

/// Interval lists in place of vectors.
inline void draw_lists(Random& random, MaskParts& parts) {
  const auto rows = static_cast<int32_t>(parts.seqlen_q);
  const int64_t most = random.integer(0, 8), longest = random.flip() ? rows : 6;
  const auto end_column = [&] { parts.column_ptr.push_back(static_cast<int32_t>(parts.intervals.size() / 2)); };
  for (int64_t bh = 0; bh < parts.batch * parts.heads; ++bh) {
    end_column();
    for (int64_t j = 0; j < parts.seqlen_k; ++j, end_column()) {
      for (int64_t n = random.integer(0, most); n > 0; --n) {
        const auto begin = static_cast<int32_t>(random.integer(-2, rows + 2));
        parts.intervals.push_back(begin);
        parts.intervals.push_back(begin + static_cast<int32_t>(random.integer(-1, longest)));
      }
    }
  }
}

inline void draw_columns(Random& random, ColumnKind kind, MaskParts& parts) {
  const auto rows = static_cast<int32_t>(parts.seqlen_q);
  const auto columns = static_cast<std::size_t>(parts.batch * parts.heads * parts.seqlen_k);
  const auto row = [&](int64_t low, int64_t high) { return static_cast<int32_t>(random.integer(low, high)); };
  const auto any = [&] { return row(-2, rows + 2); };
  switch (kind) {
    case ColumnKind::kNone:
      return;
    case ColumnKind::kDocuments: {
      parts.lts.resize(columns);
      parts.ute.resize(columns);
      int64_t left = 0;
      int32_t begin = 0, end = rows;
      for (std::size_t at = 0; at < columns; ++at, --left) {
        if (left == 0) {
          left = random.integer(1, parts.seqlen_k);
          begin = row(0, rows);
          end = row(begin, rows);
        }
        parts.lts[at] = end;
        parts.ute[at] = begin;
      }
      return;
    }
    case ColumnKind::kEviction:
      for (std::size_t at = 0; at < columns; ++at) parts.lts.push_back(row(0, rows));
      return;
    case ColumnKind::kFourBounds:
      for (std::size_t at = 0; at < columns; ++at) {
        parts.lts.push_back(any());
        parts.lte.push_back(any());
        parts.uts.push_back(any());
        parts.ute.push_back(any());
      }
      return;
    case ColumnKind::kTwoRuns:
      for (std::size_t at = 0; at < columns; ++at) {
        parts.lts.push_back(row(0, rows));
        parts.lte.push_back(parts.lts.back() + row(1, 2));
        parts.uts.push_back(row(0, rows));
        parts.ute.push_back(parts.uts.back() + row(1, rows / 8 + 1));
      }
      return;
    case ColumnKind::kSparseHoles:
      for (std::size_t at = 0; at < columns; ++at) {
        const int32_t begin = row(0, rows);
        parts.lts.push_back(begin);
        parts.lte.push_back(random.integer(0, 49) == 0 ? begin + row(1, 3) : begin);
      }
      return;
    case ColumnKind::kAlmostHidden:
      for (std::size_t at = 0; at < columns; ++at) {
        const int32_t begin = row(0, rows);
        parts.ute.push_back(begin);
        parts.lts.push_back(random.integer(0, 49) == 0 ? begin + row(1, 3) : begin);
      }
      return;
    case ColumnKind::kSomeOfFour:
      for (auto* vector : {&parts.lts, &parts.lte, &parts.uts, &parts.ute}) {
        if (random.flip()) continue;
        for (std::size_t at = 0; at < columns; ++at) vector->push_back(any());
      }
      return;
    case ColumnKind::kLists:
      return draw_lists(random, parts);
  }
}

/// Some cleared blocks, in a grid of its own batch and heads.
inline void draw_block_mask(Random& random, int64_t batch, int64_t heads, MaskParts& parts) {
  parts.block_batch = batch;
  parts.block_heads = heads;
  const int64_t blocks = ((parts.seqlen_q + 127) / 128) * ((parts.seqlen_k + 127) / 128);
  for (int64_t n = 0; n < batch * heads * blocks; ++n)
    parts.block_mask.push_back(static_cast<uint8_t>(random.integer(0, 3) == 0 ? 0 : random.integer(1, 255)));
}

/// Shapes of a random mask's positions.
enum class PositionKind {
  kTree,      ///< runs that go up by one, each from where it leaves an earlier one
  kShuffled,  ///< in no order
  kFew,       ///< many rows and keys at the same position
  kExtreme,   ///< as far apart as int32 allows
};

/// Positions for each of `batch` entries, in place of q_offset.
inline void draw_positions(Random& random, int64_t batch, MaskParts& parts) {
  const auto kind = static_cast<PositionKind>(random.integer(0, 3));
  const int64_t reach = std::max<int64_t>(std::max(parts.seqlen_q, parts.seqlen_k), 1);
  const auto draw = [&](int64_t seqlen, std::vector<int32_t>& positions) {
    int64_t next = 0;
    for (int64_t n = 0; n < batch * seqlen; ++n) {
      switch (kind) {
        case PositionKind::kTree:
          if (random.integer(0, 39) == 0) next = random.integer(0, next);
          positions.push_back(static_cast<int32_t>(next++));
          break;
        case PositionKind::kShuffled:
          positions.push_back(static_cast<int32_t>(random.integer(-reach, reach)));
          break;
        case PositionKind::kFew:
          positions.push_back(static_cast<int32_t>(random.integer(0, 3)));
          break;
        case PositionKind::kExtreme:
          positions.push_back(random.flip()   ? INT32_MAX - static_cast<int32_t>(random.integer(0, 2))
                              : random.flip() ? INT32_MIN + static_cast<int32_t>(random.integer(0, 2))
                                              : static_cast<int32_t>(random.integer(-2, 2)));
          break;
      }
    }
  };
  parts.q_offset.reset();
  parts.position_batch = batch;
  draw(parts.seqlen_q, parts.q_pos);
  draw(parts.seqlen_k, parts.k_pos);
  if (kind == PositionKind::kExtreme && random.flip()) {
    const int64_t edge = INT32_MAX - 2 + random.integer(0, 1);
    parts.band = random.flip() ? Band{.lo = -edge, .hi = std::nullopt} : Band{.lo = std::nullopt, .hi = edge};
  }
}

/// A mask of this kind with a random band and, now and then, its own q_offset.
inline MaskParts random_parts(Random& random, ColumnKind kind, int64_t seqlen_q, int64_t seqlen_k, int64_t batch = 1,
                              int64_t heads = 1) {
  MaskParts parts{.seqlen_q = seqlen_q,
                  .seqlen_k = seqlen_k,
                  .band = random_band(random, seqlen_q, seqlen_k),
                  .batch = batch,
                  .heads = heads};
  if (random.integer(0, 3) == 0) parts.q_offset = random.integer(-seqlen_q - 2, seqlen_k + 2);
  draw_columns(random, kind, parts);
  return parts;
}

inline ColumnKind random_kind(Random& random) {
  return kAllColumnKinds[random.integer(0, static_cast<int64_t>(std::size(kAllColumnKinds)) - 1)];
}

}  // namespace flashmask::test
