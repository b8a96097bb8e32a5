// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "mask/families/integers.h"

namespace flashmask::build {

/// A token's segment: its index and tokens [begin, end).
struct Place {
  int64_t index = 0, begin = 0, end = 0;
};

/// Segments of a sequence, one after the other: documents, blocks, nodes. Tokens past the last belong to an empty one.
class Segments {
 public:
  /// ends: where each ends, ascending. last_token: of segments that were found among the tokens, the sequence's last
  /// token, as `ends` has then more entries than there are segments; otherwise -1. index: the segment of each of these
  /// tokens, [leads, last_token + 1], if it is known.
  explicit Segments(const Integers& ends, int64_t last_token = -1, const int32_t* index = nullptr)
      : ends_(ends), last_token_(last_token), index_(index) {}

  FLASHMASK_COLUMN int64_t count() const { return ends_.count; }
  /// End of the first n segments.
  FLASHMASK_COLUMN int64_t end_after(const Lead& lead, int64_t n) const { return n > 0 ? ends_(lead, n - 1) : 0; }
  FLASHMASK_COLUMN int64_t total(const Lead& lead) const { return end_after(lead, count()); }

  /// The segment that a token belongs to; past the last, count() and nothing. Neighbouring tokens mostly share one.
  FLASHMASK_COLUMN Place place(const Lead& lead, int64_t token) const {
    const bool same_lead = lead.index == lead_;
    if (same_lead && token >= last_.begin && token < last_.end) return last_;
    int64_t n = same_lead && token >= last_.end ? last_.index + 1 : 0;
    if (index_)
      n = index_of(lead, token);
    else if (n >= count() || ends_(lead, n) <= token)
      n = upper_bound(ends_, lead, n, count(), token);
    n = n < count() ? n : count();
    last_ = {n, end_after(lead, n), end_after(lead, n < count() ? n + 1 : n)};
    lead_ = lead.index;
    return last_;
  }
  FLASHMASK_COLUMN int64_t last_begin(const Lead& lead) const {
    if (last_token_ < 0) return count() > 0 ? end_after(lead, count() - 1) : 0;
    if (lead.index != lead_of_last_begin_) {
      last_begin_ =
          end_after(lead, index_ ? index_of(lead, last_token_) : upper_bound(ends_, lead, 0, count(), last_token_));
      lead_of_last_begin_ = lead.index;
    }
    return last_begin_;
  }

 private:
  FLASHMASK_COLUMN int64_t index_of(const Lead& lead, int64_t token) const {
    return index_[lead.index * (last_token_ + 1) + token];
  }

  Integers ends_;
  int64_t last_token_;
  const int32_t* index_;
  mutable int64_t lead_ = -1, lead_of_last_begin_ = -1, last_begin_ = 0;
  mutable Place last_;
};

}  // namespace flashmask::build
