// SPDX-License-Identifier: Apache-2.0
#pragma once

// A request of a checked call, on the host.

#include <algorithm>
#include <cstdint>

#include "call/cached_problem.h"
#include "call/sequence_view.h"

namespace flashmask {

/// int32 element of a tensor, by the indices of its dimensions.
template <typename... Index>
int32_t int32_at(const TensorView& t, Index... index) {
  int64_t offset = 0;
  int d = 0;
  ((offset += static_cast<int64_t>(index) * t.stride[static_cast<std::size_t>(d++)]), ...);
  return static_cast<const int32_t*>(t.data)[offset];
}

class Sequence : public SequenceView {
 public:
  /// `p` outlives it.
  Sequence(const CachedProblem& p, int64_t b) : SequenceView(p.view, b), p_(p) {}
  /// With numbers that the call's tensors do not have.
  Sequence(const CachedProblem& p, int64_t b, const SequenceSizes& sizes) : SequenceView(p.view, b, sizes), p_(p) {}

  /// The places of `count` keys from `first` on.
  void load_places(int64_t first, int64_t count, KeyPlace* at) const {
    for (int64_t n = 0; n < count;) {
      const KeyPlace begin = place(first + n);
      const int64_t run = p_.has_tables() ? std::min(count - n, p_.page_size - begin.slot) : count;
      for (int64_t i = 0; i < run; ++i) at[n + i] = {begin.page, begin.slot + i};
      n += run;
    }
  }

 private:
  const CachedProblem& p_;
};

}  // namespace flashmask
