// SPDX-License-Identifier: Apache-2.0
#pragma once

// Runs of granules, written and read: once for host, device and kernels.

#include <bit>
#include <cstdint>

#include "flashmask/granule_run.h"
#include "mask/rules.h"

namespace flashmask {

/// The granules of a line's runs among those of a word that begins with granule `first`.
template <typename Word>
FLASHMASK_RULE Word runs_word(const GranuleRun* runs, int32_t first) {
  const auto up_to = [first](int32_t granule) { return rules::low_bits<Word>(granule > first ? granule - first : 0); };
  Word word = 0;
#if defined(__CUDA_ARCH__)
#pragma unroll 1  // most lines have one or two
#endif
  for (int32_t n = 0; n < kLineRuns; ++n) {
    const GranuleRun run = runs[n];
    if (run.end == 0) break;
    word |= up_to(run.end) & ~up_to(run.begin);
  }
  return word;
}

/// Writes a line's runs from its words of bits, which come in ascending order.
class RunWriter {
 public:
  FLASHMASK_RULE explicit RunWriter(GranuleRun* runs) : runs_(runs) {}

  /// Granules from `first` on.
  template <typename Word>
  FLASHMASK_RULE void add(Word bits, int32_t first) {
    const auto is_open = static_cast<Word>(begin_ >= 0 ? 1 : 0);
    for (auto edges = static_cast<Word>(bits ^ (bits << 1 | is_open)); edges; edges &= edges - 1)
      turn(first + lowest_bit(edges));
  }
  /// Ends a line of so many granules, and returns how many runs it has: those that there was no room for, too.
  FLASHMASK_RULE int32_t finish(int32_t granules) {
    if (begin_ >= 0) turn(granules);
    for (int32_t n = count_; n < kLineRuns; ++n) runs_[n] = {};
    return count_;
  }

 private:
  template <typename Word>
  FLASHMASK_RULE static int32_t lowest_bit(Word word) {
#if defined(__CUDA_ARCH__)
    return __ffsll(static_cast<long long>(word)) - 1;
#else
    return std::countr_zero(word);
#endif
  }
  /// A run begins or ends.
  FLASHMASK_RULE void turn(int32_t granule) {
    if (begin_ < 0) {
      begin_ = granule;
      return;
    }
    if (count_ < kLineRuns) runs_[count_] = {begin_, granule};
    ++count_;
    begin_ = -1;
  }

  GranuleRun* runs_;
  int32_t count_ = 0, begin_ = -1;  ///< begin_: of the run that has not ended, or -1
};

}  // namespace flashmask
