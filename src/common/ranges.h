// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace flashmask {

/// Sorts ranges [begin, end) and joins those that overlap or touch.
template <typename Range>
void join_ranges(std::vector<Range>& ranges) {
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  std::size_t joined = 0;
  for (const Range& range : ranges) {
    if (joined > 0 && range.begin <= ranges[joined - 1].end) {
      ranges[joined - 1].end = std::max(ranges[joined - 1].end, range.end);
    } else {
      ranges[joined++] = range;
    }
  }
  ranges.resize(joined);
}

}  // namespace flashmask
