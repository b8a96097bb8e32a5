// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "mask/build/integers.h"

namespace flashmask::build {

/// Segments of a sequence, one after the other: documents, blocks, nodes. Tokens past the last belong to an empty one.
class Segments {
 public:
  /// ends: where each ends, ascending. last_token: of segments that were found among the tokens, the sequence's last
  /// token, as `ends` has then more entries than there are segments; otherwise -1.
  explicit Segments(const Integers& ends, int64_t last_token = -1) : ends_(ends), last_token_(last_token) {}

  FLASHMASK_COLUMN int64_t count() const { return ends_.count; }
  /// Where the first n segments end.
  FLASHMASK_COLUMN int64_t end_of_first(const Lead& lead, int64_t n) const { return n > 0 ? ends_(lead, n - 1) : 0; }
  FLASHMASK_COLUMN int64_t total(const Lead& lead) const { return end_of_first(lead, count()); }

  /// The segment that a token belongs to; count() past the last.
  FLASHMASK_COLUMN int64_t index(const Lead& lead, int64_t token) const {
    // Neighbouring tokens mostly share a segment, and a thread's tokens ascend.
    const bool found = hint_ < count() && ends_(lead, hint_) > token && end_of_first(lead, hint_) <= token;
    if (!found) hint_ = upper_bound(ends_, lead, 0, count(), token);
    return hint_;
  }
  FLASHMASK_COLUMN int64_t begin(const Lead& lead, int64_t n) const { return end_of_first(lead, n); }
  FLASHMASK_COLUMN int64_t end(const Lead& lead, int64_t n) const {
    return end_of_first(lead, n < count() ? n + 1 : n);
  }
  FLASHMASK_COLUMN int64_t last_begin(const Lead& lead) const {
    if (last_token_ >= 0) return begin(lead, index(lead, last_token_));
    return count() > 0 ? begin(lead, count() - 1) : 0;
  }

 private:
  Integers ends_;
  int64_t last_token_;
  mutable int64_t hint_ = 0;
};

/// Where a token's segment lies.
struct Place {
  int64_t index, begin, end;
};

FLASHMASK_COLUMN Place place_of(const Segments& segments, const Lead& lead, int64_t token) {
  const int64_t n = segments.index(lead, token);
  return {n, segments.begin(lead, n), segments.end(lead, n)};
}

}  // namespace flashmask::build
