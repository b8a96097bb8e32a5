// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which rows of a column with an interval list are visible, 64 at a time: for the plan's builders, on host and device.

#include <cstdint>

#include "mask/rules.h"

namespace flashmask::rules {

/// The interval lists of one batch entry and head, as anyone may have written them; `count` intervals are there.
struct IntervalLists {
  const int32_t* column_ptr;
  const int32_t* intervals;
  int32_t count;
};

/// The numbers of column `key`'s intervals, none that is not there.
FLASHMASK_RULE Interval listed_numbers(const IntervalLists& lists, int32_t key) {
  return {clamp_row(lists.column_ptr[key], lists.count), clamp_row(lists.column_ptr[int64_t{key} + 1], lists.count)};
}

FLASHMASK_RULE Interval listed_interval(const IntervalLists& lists, int32_t n) {
#if defined(__CUDA_ARCH__)
  const int2 both = reinterpret_cast<const int2*>(lists.intervals)[n];  // one load: on a device they are aligned to 8
  return {both.x, both.y};
#else
  return {lists.intervals[2 * int64_t{n}], lists.intervals[2 * int64_t{n} + 1]};
#endif
}

/// True if an interval may follow one that ends at `end` in a list that ascends.
FLASHMASK_RULE bool ascends_from(int32_t end, Interval next) { return end <= next.begin && next.begin <= next.end; }

/// The 64 rows from row0 >= 0 on that are not hidden: bit r for row row0 + r.
FLASHMASK_RULE uint64_t rows_outside(Interval hidden, int32_t row0) {
  // Not begin - row0 at once: a list's values may be any numbers.
  const int32_t begin = (hidden.begin > row0 ? hidden.begin : row0) - row0,
                end = (hidden.end > row0 ? hidden.end : row0) - row0;
  return low_bits<uint64_t>(begin) | bits_from<uint64_t>(end);
}

/// The rows of a column that its list and the band, unless that is over positions, leave visible, read in ascending
/// order.
class ListedRows {
 public:
  static constexpr int32_t kRows = 64;

  /// `ascends`: the list does, so that only the intervals that reach into rows are read; `row0`: the first rows' first.
  FLASHMASK_RULE ListedRows(const Columns& band, const IntervalLists& lists, int32_t key, bool ascends, int32_t row0)
      : lists_(lists), seqlen_q_(band.seqlen_q), ascends_(ascends) {
    const HiddenRows hidden = hidden_rows(band, key);
    top_ = hidden.interval[0];
    bottom_ = hidden.interval[1];
    numbers_ = listed_numbers(lists, key);
    if (ascends) skip_to(row0);
  }

  /// Rows row0 to row0 + 63, a bit each; those past the last are hidden.
  FLASHMASK_RULE uint64_t next(int32_t row0) {
    const int64_t end = int64_t{row0} + kRows;
    uint64_t visible = low_bits<uint64_t>(seqlen_q_ - row0) & rows_outside(top_, row0) & rows_outside(bottom_, row0);
    for (int32_t n = numbers_.begin; n < numbers_.end; ++n) {
      const Interval hidden = listed_interval(lists_, n);
      if (ascends_ && hidden.begin >= end) break;
      visible &= rows_outside(hidden, row0);
      if (!ascends_) continue;
      if (hidden.end > end) break;
      numbers_.begin = n + 1;
    }
    return visible;
  }

 private:
  /// Leaves out the intervals that end before row0.
  FLASHMASK_RULE void skip_to(int32_t row0) {
    int32_t last = numbers_.end;
    while (numbers_.begin < last) {
      const int32_t middle = numbers_.begin + (last - numbers_.begin) / 2;
      if (listed_interval(lists_, middle).end > row0) {
        last = middle;
      } else {
        numbers_.begin = middle + 1;
      }
    }
  }

  IntervalLists lists_;
  int32_t seqlen_q_;
  bool ascends_;
  Interval top_, bottom_, numbers_;
};

/// `rows`, of rows row0 to row0 + 63, without those that a band over positions hides from `key`.
FLASHMASK_RULE uint64_t rows_in_band(const PositionBand& band, int32_t key, int32_t row0, uint64_t rows) {
  if (!band.q_pos) return rows;
  const int32_t position = band.k_pos[key];
  for (int32_t r = 0; r < ListedRows::kRows; ++r) {
    if ((rows >> r & 1) != 0 && !in_band(band, band.q_pos[row0 + r], position)) rows &= ~(uint64_t{1} << r);
  }
  return rows;
}

}  // namespace flashmask::rules
