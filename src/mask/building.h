// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the builders of builders.cpp and of model_masks.cpp share.

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "common/message.h"
#include "flashmask/builders.h"

namespace flashmask::building {

inline void check_not_negative(const char* argument, int64_t value) {
  if (value < 0) throw_invalid(argument, " is ", value, "; it must be at least 0");
}

inline void check_spans(const char* argument, std::span<const Span> spans, int64_t seqlen) {
  int64_t end = 0;
  for (std::size_t n = 0; n < spans.size(); ++n) {
    const Span span = spans[n];
    if (span.begin < end || span.end < span.begin || span.end > seqlen) {
      throw_invalid(argument, "[", n, "] is [", span.begin, ", ", span.end,
                    "); spans must be ascending, disjoint and within [0, ", seqlen, ")");
    }
    end = span.end;
  }
}

inline int32_t row(int64_t value) { return static_cast<int32_t>(value); }

/// A causal square mask with these LTS.
inline Mask causal_until(std::vector<int32_t> lts) {
  const auto seqlen = static_cast<int64_t>(lts.size());
  return Mask({.seqlen_q = seqlen, .seqlen_k = seqlen, .band = Band::causal(), .lts = std::move(lts)});
}

}  // namespace flashmask::building
