// SPDX-License-Identifier: Apache-2.0
#pragma once

// The two rules of the library, written once for host, device and drawing:
//   which rows of a column are hidden (and so whether an element is visible), and
//   what class a tile is.
// Everything here is plain arithmetic on int32 rows and keys and compiles as CUDA device code.

#include <cstdint>

#if defined(__CUDACC__)
#define FLASHMASK_RULE __host__ __device__ inline
#else
#define FLASHMASK_RULE inline
#endif

namespace flashmask::rules {

/// Rows [begin, end); empty if begin >= end.
struct Interval {
  int32_t begin, end;
};

/// One batch entry and head of a mask: the band on j - i and the interval vectors over the key columns. A
/// null begin vector means row 0, a null end vector seqlen_q, both null no interval.
struct Columns {
  int32_t seqlen_q;
  int32_t diagonal_lo, diagonal_hi;
  const int32_t* lts;
  const int32_t* lte;
  const int32_t* uts;
  const int32_t* ute;
};

/// The rows a column is hidden from: what the band cuts off above and below, and the two intervals, clamped
/// to [0, seqlen_q]. They may be empty, overlap and come in any order.
struct HiddenRows {
  Interval interval[4];
};

FLASHMASK_RULE int32_t clamp_row(int64_t row, int32_t seqlen_q) {
  return row < 0 ? 0 : row > seqlen_q ? seqlen_q : static_cast<int32_t>(row);
}

FLASHMASK_RULE Interval stored_interval(const int32_t* begin, const int32_t* end, int32_t j, int32_t seqlen_q) {
  if (!begin && !end) return {0, 0};
  return {begin ? clamp_row(begin[j], seqlen_q) : 0, end ? clamp_row(end[j], seqlen_q) : seqlen_q};
}

FLASHMASK_RULE HiddenRows hidden_rows(const Columns& m, int32_t j) {
  // j - i > hi hides the rows before j - hi; j - i < lo those after j - lo.
  const int64_t above_end = m.diagonal_hi == INT32_MAX ? 0 : int64_t{j} - m.diagonal_hi;
  const int64_t below_begin = m.diagonal_lo == INT32_MIN ? m.seqlen_q : int64_t{j} - m.diagonal_lo + 1;
  return {{{0, clamp_row(above_end, m.seqlen_q)},
           {clamp_row(below_begin, m.seqlen_q), m.seqlen_q},
           stored_interval(m.lts, m.lte, j, m.seqlen_q),
           stored_interval(m.uts, m.ute, j, m.seqlen_q)}};
}

FLASHMASK_RULE bool is_visible(const HiddenRows& hidden, int32_t i) {
  bool visible = true;
  for (int n = 0; n < 4; ++n) visible &= i < hidden.interval[n].begin || i >= hidden.interval[n].end;
  return visible;
}

FLASHMASK_RULE bool is_visible(const Columns& m, int32_t i, int32_t j) { return is_visible(hidden_rows(m, j), i); }

/// Bits [0, n) set, n in [0, 64].
FLASHMASK_RULE uint64_t low_bits(int64_t n) { return n >= 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1; }

/// Bit r is set if row row0 + r sees the column, r in [0, 64).
FLASHMASK_RULE uint64_t visible_bits(const HiddenRows& hidden, int32_t row0) {
  uint64_t bits = 0;
  for (int n = 0; n < 4; ++n) {
    const int64_t begin = int64_t{hidden.interval[n].begin} - row0;
    const int64_t end = int64_t{hidden.interval[n].end} - row0;
    if (begin >= end || begin >= 64 || end <= 0) continue;
    bits |= low_bits(end) & ~low_bits(begin < 0 ? 0 : begin);
  }
  return ~bits;
}

/// Sorts and merges into disjoint intervals with a gap between them; returns how many.
FLASHMASK_RULE int merge(const HiddenRows& hidden, Interval (&out)[4]) {
  int n = 0;
  for (int k = 0; k < 4; ++k) {
    Interval x = hidden.interval[k];
    if (x.begin >= x.end) continue;
    int at = n++;
    for (; at > 0 && out[at - 1].begin > x.begin; --at) out[at] = out[at - 1];
    out[at] = x;
  }
  int merged = 0;
  for (int k = 0; k < n; ++k) {
    if (merged > 0 && out[k].begin <= out[merged - 1].end) {
      if (out[k].end > out[merged - 1].end) out[merged - 1].end = out[k].end;
    } else {
      out[merged++] = out[k];
    }
  }
  return merged;
}

// A tile of rows is empty if every one of its columns is hidden from all of its rows, full if no column is
// hidden from any. With a column's hidden rows merged, both are counted by adding +1 at the first and -1
// past the last tile of these two ranges and summing up.

/// The row tiles that lie wholly inside `hidden`; the last tile ends with the sequence.
FLASHMASK_RULE Interval covered_tiles(Interval hidden, int32_t tile_rows, int32_t seqlen_q) {
  const int32_t tiles = seqlen_q / tile_rows + (seqlen_q % tile_rows != 0);
  const int32_t first = hidden.begin / tile_rows + (hidden.begin % tile_rows != 0);
  return {first, hidden.end == seqlen_q ? tiles : hidden.end / tile_rows};
}

/// The row tiles that `hidden` reaches into.
FLASHMASK_RULE Interval touched_tiles(Interval hidden, int32_t tile_rows) {
  return {hidden.begin / tile_rows, hidden.end / tile_rows + (hidden.end % tile_rows != 0)};
}

/// Given how many of a tile's `columns` are hidden from all its rows.
FLASHMASK_RULE bool is_live(int32_t covered_columns, int32_t columns) { return covered_columns < columns; }

/// Given how many columns have a hidden row in the tile.
FLASHMASK_RULE bool is_full(int32_t touched_columns) { return touched_columns == 0; }

}  // namespace flashmask::rules
