// SPDX-License-Identifier: Apache-2.0
#pragma once

// The two rules of the library, written once for host, device and drawing:
//   which rows of a column are hidden, by indices or positions (and so whether an element is visible), and
//   the class of a tile.
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
/// null begin vector means row 0, a null end vector seqlen_q, both null no interval. Neighbouring columns lie
/// `stride` elements apart.
struct Columns {
  int32_t seqlen_q;
  int32_t diagonal_lo, diagonal_hi;
  const int32_t* lts;
  const int32_t* lte;
  const int32_t* uts;
  const int32_t* ute;
  int64_t stride = 1;
};

/// The rows a column is hidden from: the rows that the band cuts off above and below, and the two intervals, clamped to
/// [0, seqlen_q]. They may be empty, overlap and come in any order.
struct HiddenRows {
  Interval interval[4];
};

template <typename Int>
FLASHMASK_RULE int32_t clamp_row(Int row, int32_t seqlen_q) {
  const Int at_most = row < seqlen_q ? row : static_cast<Int>(seqlen_q);
  return at_most > 0 ? static_cast<int32_t>(at_most) : 0;
}

/// clamp_row(key - diagonal) in 32 bits, key >= 0: it is the diagonal that is clamped, to where the difference is a
/// row, so nothing overflows.
FLASHMASK_RULE int32_t clamp_row_on_diagonal(int32_t key, int32_t diagonal, int32_t seqlen_q) {
  const int32_t at_least = diagonal > key - seqlen_q ? diagonal : key - seqlen_q;
  return key - (at_least < key ? at_least : key);
}

/// `at` is the column's element in the vectors.
FLASHMASK_RULE Interval stored_interval(const int32_t* begin, const int32_t* end, int64_t at, int32_t seqlen_q) {
  if (!begin && !end) return {0, 0};
  return {begin ? clamp_row(begin[at], seqlen_q) : 0, end ? clamp_row(end[at], seqlen_q) : seqlen_q};
}

/// Rows that column j < INT32_MAX is hidden from.
FLASHMASK_RULE HiddenRows hidden_rows(const Columns& m, int32_t j) {
  // j - i > hi hides the rows before j - hi; j - i < lo those after j - lo. An unbounded edge hides none: j - INT32_MAX
  // is at most 0, and j + 1 - INT32_MIN past every sequence.
  const int64_t at = j * m.stride;
  return {{{0, clamp_row_on_diagonal(j, m.diagonal_hi, m.seqlen_q)},
           {clamp_row_on_diagonal(j + 1, m.diagonal_lo, m.seqlen_q), m.seqlen_q},
           stored_interval(m.lts, m.lte, at, m.seqlen_q),
           stored_interval(m.uts, m.ute, at, m.seqlen_q)}};
}

FLASHMASK_RULE bool is_visible(const HiddenRows& hidden, int32_t i) {
  bool visible = true;
  for (int n = 0; n < 4; ++n) visible &= i < hidden.interval[n].begin || i >= hidden.interval[n].end;
  return visible;
}

FLASHMASK_RULE bool is_visible(const Columns& m, int32_t i, int32_t j) { return is_visible(hidden_rows(m, j), i); }

/// Bits [n, width) of a word set, none if n is the width or more; n >= 0.
template <typename Word>
FLASHMASK_RULE Word bits_from(int32_t n) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(Word) == 4) return __funnelshift_lc(0u, ~0u, static_cast<uint32_t>(n));  // one shift that clamps
#endif
  return n >= static_cast<int32_t>(sizeof(Word) * 8) ? Word{0} : static_cast<Word>(~Word{0} << n);
}

/// Bits [0, n) set, all if n is the width or more; n >= 0.
template <typename Word = uint64_t>
FLASHMASK_RULE Word low_bits(int32_t n) {
  return static_cast<Word>(~bits_from<Word>(n));
}

/// Mask of the 32 rows that begin 32 * window rows after row0: bit r is set if its row is row0 + from or later.
FLASHMASK_RULE uint32_t window_from(int32_t from, int window) {
  const int32_t rest = from - 32 * window;
  return bits_from<uint32_t>(rest > 0 ? rest : 0);
}

/// How many rows after row0 the diagonal is at this key, clamped so that adding a small number does not overflow.
FLASHMASK_RULE int32_t rows_to_diagonal(int32_t key, int32_t diagonal, int32_t row0) {
  constexpr int64_t kFar = int64_t{1} << 30;
  const int64_t rows = static_cast<int64_t>(key) - diagonal - row0;
  return static_cast<int32_t>(rows > kFar ? kFar : rows < -kFar ? -kFar : rows);
}

/// The band where a tile begins, at column `first` and row row0: row row0 + r sees column first + c if top + c <= r <
/// bottom + c. Edges that are far away are somewhere far away.
struct TileBand {
  int32_t top, bottom;
};

FLASHMASK_RULE TileBand tile_band(const Columns& m, int32_t first, int32_t row0) {
  // Kernels ask for every tile, and 64-bit arithmetic is dear to them.
  const bool above = m.diagonal_hi != INT32_MAX, below = m.diagonal_lo != INT32_MIN;
  return {above ? rows_to_diagonal(first, m.diagonal_hi, row0) : -(1 << 30),
          below ? rows_to_diagonal(first, m.diagonal_lo, row0) + 1 : 1 << 30};
}

/// The columns first + c, c of the interval, that the band lets row row0 + r see, 0 <= r < 2^20; not clamped to the
/// tile.
FLASHMASK_RULE Interval columns_in_band(TileBand band, int32_t r) { return {r - band.bottom + 1, r - band.top + 1}; }

/// For n columns of a tile, first + at[i] (0 <= at[i] < tile_keys <= 2^20): bit r of bits[w][i] is set if row row0 + 32
/// w + r (below seqlen_q) sees the column, r < 32; row0 >= 0. `bounds` reads the vectors: bounds(interval, begin, end)
/// sets where interval 0 or 1 of the n columns begins and ends, or returns false if the mask has no such interval.
template <int tile_keys, int windows, int n, typename Bounds>
FLASHMASK_RULE void visible_windows(const Columns& m, const Bounds& bounds, int32_t first, const int32_t (&at)[n],
                                    int32_t row0, uint32_t (&bits)[windows][n]) {
  const TileBand band = tile_band(m, first, row0);
  for (int i = 0; i < n; ++i) {
    for (int w = 0; w < windows; ++w) bits[w][i] = ~0u;
  }
  if (band.top + tile_keys > 1) {
    for (int i = 0; i < n; ++i) {
      for (int w = 0; w < windows; ++w) bits[w][i] = window_from(band.top + at[i], w);
    }
  }
  if (band.bottom < 32 * windows) {
    for (int i = 0; i < n; ++i) {
      for (int w = 0; w < windows; ++w) bits[w][i] &= ~window_from(band.bottom + at[i], w);
    }
  }
  // One body for both intervals: a kernel has no registers for the bounds of both.
#if defined(__CUDA_ARCH__)
#pragma unroll 1
#endif
  for (int interval = 0; interval < 2; ++interval) {
    int32_t begin[n], end[n];
    if (!bounds(interval, begin, end)) continue;
    for (int i = 0; i < n; ++i) {
      // Not begin - row0 at once: a vector's values may be any numbers.
      const int32_t skipped = (begin[i] > row0 ? begin[i] : row0) - row0,
                    until = (end[i] > row0 ? end[i] : row0) - row0;
      bits[0][i] &= ~bits_from<uint32_t>(skipped) | bits_from<uint32_t>(until);
      for (int w = 1; w < windows; ++w) bits[w][i] &= ~window_from(skipped, w) | window_from(until, w);
    }
  }
}

/// Puts the one that begins first in `a`.
FLASHMASK_RULE void order(Interval& a, Interval& b) {
  const Interval x = a, y = b;
  const bool swap = y.begin < x.begin;
  a = swap ? y : x;
  b = swap ? x : y;
}

/// Merges the rows into ascending intervals with gaps between them; some of the four are empty. All indices are
/// constants, so that a device keeps the intervals in registers.
FLASHMASK_RULE HiddenRows merge(HiddenRows hidden) {
  Interval(&x)[4] = hidden.interval;
  for (int k = 0; k < 4; ++k) {
    if (x[k].begin >= x[k].end) x[k] = {INT32_MAX, INT32_MAX};  // behind all others
  }
  order(x[0], x[1]);
  order(x[2], x[3]);
  order(x[0], x[2]);
  order(x[1], x[3]);
  order(x[1], x[2]);
  for (int k = 0; k < 3; ++k) {
    if (x[k + 1].begin > x[k].end) continue;
    x[k + 1] = {x[k].begin, x[k].end > x[k + 1].end ? x[k].end : x[k + 1].end};
    x[k] = {0, 0};
  }
  return hidden;
}

/// Sorts and merges into disjoint intervals with a gap between them; returns how many.
FLASHMASK_RULE int merge(const HiddenRows& hidden, Interval (&out)[4]) {
  const HiddenRows merged = merge(hidden);
  int n = 0;
  for (int k = 0; k < 4; ++k) {
    if (merged.interval[k].begin < merged.interval[k].end) out[n++] = merged.interval[k];
  }
  return n;
}

// --- The band over positions ----------------------------------------------------------------------

/// One batch entry's band over positions: row i sees key j only if lo <= k_pos[j] - q_pos[i] <= hi; INT32_MIN and
/// INT32_MAX are unbounded. Without positions it lets every row see every key. The Columns that it goes with have no
/// band of their own.
struct PositionBand {
  int32_t lo = INT32_MIN, hi = INT32_MAX;
  const int32_t* q_pos = nullptr;
  const int32_t* k_pos = nullptr;
};

/// The first and the last position of a key that a row at `q_pos` sees, beyond int32 where the band is unbounded.
FLASHMASK_RULE int64_t first_position(const PositionBand& band, int32_t q_pos) {
  return band.lo == INT32_MIN ? INT64_MIN : static_cast<int64_t>(q_pos) + band.lo;
}
FLASHMASK_RULE int64_t last_position(const PositionBand& band, int32_t q_pos) {
  return band.hi == INT32_MAX ? INT64_MAX : static_cast<int64_t>(q_pos) + band.hi;
}

/// True if a row at `q_pos` sees a key at `k_pos`.
FLASHMASK_RULE bool in_band(const PositionBand& band, int32_t q_pos, int32_t k_pos) {
  return first_position(band, q_pos) <= k_pos && k_pos <= last_position(band, q_pos);
}

/// The positions of the keys that a row sees, both ends inclusive; none if first > last.
struct SeenPositions {
  int32_t first, last;
};

/// As in_band says, in 32 bits, for kernels that have few registers.
FLASHMASK_RULE SeenPositions seen_positions(const PositionBand& band, int32_t q_pos) {
  const auto sum = [q_pos](int32_t edge) {
    return static_cast<int32_t>(static_cast<uint32_t>(q_pos) + static_cast<uint32_t>(edge));
  };
  SeenPositions seen{sum(band.lo), sum(band.hi)};
  const bool below = band.lo < 0 && seen.first > q_pos, above = band.hi > 0 && seen.last < q_pos;
  const bool none = (band.lo > 0 && seen.first < q_pos) || (band.hi < 0 && seen.last > q_pos);
  if (below || band.lo == INT32_MIN) seen.first = INT32_MIN;
  if (above || band.hi == INT32_MAX) seen.last = INT32_MAX;
  return none ? SeenPositions{INT32_MAX, INT32_MIN} : seen;
}

/// The least and the greatest of some positions.
struct PositionRange {
  int32_t least = INT32_MAX, greatest = INT32_MIN;
};

FLASHMASK_RULE PositionRange with(PositionRange range, int32_t position) {
  return {position < range.least ? position : range.least, position > range.greatest ? position : range.greatest};
}

/// True if some row of a tile may see some key of it; false is exact. True without all_in_band() says nothing: the tile
/// may be of any class.
FLASHMASK_RULE bool some_in_band(const PositionBand& band, PositionRange rows, PositionRange keys) {
  return first_position(band, rows.least) <= keys.greatest && keys.least <= last_position(band, rows.greatest);
}

/// True if every row of a tile sees every key of it.
FLASHMASK_RULE bool all_in_band(const PositionBand& band, PositionRange rows, PositionRange keys) {
  return first_position(band, rows.greatest) <= keys.least && keys.greatest <= last_position(band, rows.least);
}

/// The last row that sees key `key`, -1 if none does. `is_live(granule)`: whether the plan calls this granule of
/// `granule_rows` rows live for the key, as it does if a row of it sees the key; `band` may be over positions.
template <int granule_rows, typename IsLive>
FLASHMASK_RULE int32_t last_visible_row(const Columns& columns, const PositionBand& band, int32_t key,
                                        const IsLive& is_live) {
  const HiddenRows hidden = merge(hidden_rows(columns, key));
  int32_t end = columns.seqlen_q;
  for (int k = 3; k >= -1; --k) {
    // Searches the visible rows between two hidden intervals, the last ones first.
    const Interval before = k < 0 ? Interval{0, 0} : hidden.interval[k];
    if (k >= 0 && before.begin >= before.end) continue;
    for (int32_t row = end - 1; row >= before.end;) {
      if (!is_live(row / granule_rows)) {
        row = row / granule_rows * granule_rows - 1;
      } else if (!band.q_pos || in_band(band, band.q_pos[row], band.k_pos[key])) {
        return row;
      } else {
        --row;
      }
    }
    end = before.begin;
  }
  return -1;
}

// --- Classes of tiles -----------------------------------------------------------------------------

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
