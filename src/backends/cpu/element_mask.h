// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "backends/cpu/tile_kernels.h"
#include "call/problem.h"
#include "call/sink_and_dropout.h"
#include "mask/column_rows.h"
#include "mask/rules.h"

namespace flashmask::cpu {

/// A key tile's bounds from the mask's vectors, for rules::visible_windows. Keys past the sequence's end have none.
struct TileBounds {
  const rules::Columns& columns;
  int32_t key0, keys;

  bool operator()(int interval, int32_t (&begin)[kTileKeys], int32_t (&end)[kTileKeys]) const {
    const int32_t* from = interval == 0 ? columns.lts : columns.uts;
    const int32_t* to = interval == 0 ? columns.lte : columns.ute;
    if (!from && !to) return false;
    load(from, 0, begin);
    load(to, columns.seqlen_q, end);
    return true;
  }

 private:
  void load(const int32_t* vector, int32_t without, int32_t (&to)[kTileKeys]) const {
    std::fill(to, to + kTileKeys, without);
    if (!vector) return;
    for (int32_t j = 0; j < keys; ++j) to[j] = vector[(key0 + j) * columns.stride];
  }
};

/// Which elements of a partial tile are visible: bit i % 32 of rows[i / 32][j] for row i and key j of the tile.
/// Keys past the end of the sequence are not visible; rows past it may be either. Keys are a vector's lanes or
/// broadcast, as the kernel needs it.
struct alignas(64) ElementMask {
  uint32_t rows[kTileRows / 32][kTileKeys];

  /// Loads a tile from the mask's rule. Blocks that a block mask clears are never live, so it does not show up here.
  void load(const ColumnRows& column_rows, int64_t row0, int64_t key0, int64_t keys) {
    const rules::Columns& columns = column_rows.columns();
    int32_t at[kTileKeys];
    std::iota(at, at + kTileKeys, 0);
    const TileBounds bounds{columns, static_cast<int32_t>(key0), static_cast<int32_t>(keys)};
    rules::visible_windows<kTileKeys>(columns, bounds, bounds.key0, at, static_cast<int32_t>(row0), rows);
    for (uint32_t (&words)[kTileKeys] : rows) std::fill(words + keys, words + kTileKeys, 0u);
    if (column_rows.has_lists()) hide_lists(column_rows, bounds.key0, static_cast<int32_t>(row0), keys);
  }

  /// Hides the elements of a tile that the columns' interval lists hide.
  void hide_lists(const ColumnRows& column_rows, int32_t key0, int32_t row0, int64_t keys) {
    const int32_t rows_here = std::min<int32_t>(kTileRows, column_rows.columns().seqlen_q - row0);
    for (int32_t j = 0; j < keys; ++j) {
      column_rows.for_each_listed(key0 + j, row0, row0 + rows_here, [&](rules::Interval hidden) {
        const int32_t begin = std::max(hidden.begin, row0) - row0, end = std::min(hidden.end, row0 + rows_here) - row0;
        for (int32_t w = begin / 32; w * 32 < end; ++w)
          rows[w][j] &= ~rules::window_from(begin, w) | rules::window_from(end, w);
      });
    }
  }

  /// Hides the elements that a band over positions hides; its rows and keys are the tile's.
  void hide(const rules::PositionBand& band, int64_t row_count, int64_t keys) {
    for (int64_t i = 0; i < row_count; ++i) {
      uint32_t* words = rows[i / 32];
      for (int64_t j = 0; j < keys; ++j)
        words[j] &= ~(uint32_t{!rules::in_band(band, band.q_pos[i], band.k_pos[j])} << (i % 32));
    }
  }

  /// Loads the elements of a whole tile that `source` keeps, instead of the visible ones.
  void load(const DropoutSource& source, int64_t row0, int64_t key0) {
    std::fill(&rows[0][0], &rows[0][0] + sizeof(rows) / sizeof(uint32_t), 0u);
    constexpr int kDraws = kTileKeys / 4;  // draws per two rows
    const uint32_t threshold = source.threshold();
    for (int64_t i = 0; i < kTileRows; ++i) {
      if (i / 8 % 2 != 0) continue;  // drawn with the row eight before it
      uint32_t words[4][kDraws];
      for (int n = 0; n < kDraws; ++n) {
        const int64_t key = key0 + n / 4 * 16 + n % 4 * 2;
        const dropout::Words draw = source.draw(static_cast<uint32_t>(row0 + i), static_cast<uint32_t>(key));
        for (int w = 0; w < 4; ++w) words[w][n] = draw.word[w];
      }
      for (int w = 0; w < 4; ++w) {
        const int64_t row = i + w / 2 * 8;
        for (int n = 0; n < kDraws; ++n) {
          uint32_t* const pair = &rows[row / 32][n / 4 * 16 + w % 2 * 8 + n % 4 * 2];
          pair[0] |= static_cast<uint32_t>((words[w][n] & 0xffff) >= threshold) << row % 32;
          pair[1] |= static_cast<uint32_t>(words[w][n] >> 16 >= threshold) << row % 32;
        }
      }
    }
  }

  /// Loads a tile from a dense matrix.
  void load(const uint8_t* matrix, int64_t row_stride, int64_t key_stride, int64_t row_count, int64_t keys) {
    std::fill(&rows[0][0], &rows[0][0] + sizeof(rows) / sizeof(uint32_t), 0u);
    for (int64_t i = 0; i < row_count; ++i) {
      const uint8_t* row = matrix + i * row_stride;
      uint32_t* out = rows[i / 32];
      for (int64_t j = 0; j < keys; ++j) out[j] |= static_cast<uint32_t>(row[j * key_stride] != 0) << (i % 32);
    }
  }
};

}  // namespace flashmask::cpu
