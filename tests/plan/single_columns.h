// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "mask/rules.h"

/// The rules one column at a time, for host and device: what rules::visible_windows is held against, and fed from.
namespace flashmask::test {

/// Bit r is set if row row0 + r sees the column, for every bit of the word (uint64_t or uint32_t); row0 >= 0.
/// There are no branches: what an interval has before row0 shifts by nothing, what it has past the word shifts
/// everything out, and an empty or reversed one leaves no bit.
template <typename Word = uint64_t>
FLASHMASK_RULE Word visible_bits(const rules::HiddenRows& hidden, int32_t row0) {
  Word bits = 0;
  for (int n = 0; n < 4; ++n) {
    const int32_t begin = hidden.interval[n].begin - row0, end = hidden.interval[n].end - row0;
    bits |= rules::bits_from<Word>(begin < 0 ? 0 : begin) & ~rules::bits_from<Word>(end < 0 ? 0 : end);
  }
  return static_cast<Word>(~bits);
}

/// The vectors' elements of the columns first + at[i] (0 <= at[i], at[i] * stride < 2^31).
template <int n>
struct StoredBounds {
  const rules::Columns& columns;
  int32_t first;
  const int32_t (&at)[n];

  /// Finds begin and end of interval 0 or 1 of the columns; false if the mask has no such interval.
  FLASHMASK_RULE bool operator()(int interval, int32_t (&begin)[n], int32_t (&end)[n]) const {
    const int32_t* from = interval == 0 ? columns.lts : columns.uts;
    const int32_t* to = interval == 0 ? columns.lte : columns.ute;
    if (!from && !to) return false;
    const int64_t base = first * columns.stride;
    for (int i = 0; i < n; ++i) {
      const int32_t place = at[i] * static_cast<int32_t>(columns.stride);
      begin[i] = from ? (from + base)[place] : 0;
      end[i] = to ? (to + base)[place] : columns.seqlen_q;
    }
    return true;
  }
};

}  // namespace flashmask::test
