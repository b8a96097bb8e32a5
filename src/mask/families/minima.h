// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "mask/families/integers.h"

namespace flashmask::build {

/// Finds the next small entry in few steps: keeps the entries of each lead (level 0), the smallest of each run of 32
/// entries (level 1), the smallest of each run of 32 of level 1, and so on.
struct Minima {
  static constexpr int kRunBits = 5, kRun = 1 << kRunBits;
  /// Most entries of the top level, whose runs are searched one after the other.
  static constexpr int64_t kWidest = int64_t{4} * kRun;

  int64_t count = 0;  ///< number of entries
  int levels = 1;
  int64_t words = 0;          ///< for each lead
  int32_t* memory = nullptr;  ///< `words` for each lead

  /// Sizes the levels for `entries`; each step (NoteMinima) adds two.
  explicit Minima(int64_t entries) : count(entries) {
    do {
      levels += 2;
    } while (count_of(levels - 1) > kWidest);
    words = words_below(levels);
  }

  FLASHMASK_COLUMN int64_t count_of(int level) const { return count > 0 ? ((count - 1) >> (kRunBits * level)) + 1 : 0; }
  FLASHMASK_COLUMN int32_t* entries_of(const Lead& lead, int level) const {
    return memory + lead.index * words + words_below(level);
  }

  /// The first entry of [from, until) that is less than `limit`, or `until`.
  FLASHMASK_COLUMN int64_t first_below(const Lead& lead, int32_t limit, int64_t from, int64_t until) const {
    const int32_t* own = entries_of(lead, 0);
    for (int level = 0; from << (kRunBits * level) < until;) {
      const int64_t run = from & -kRun, left = count_of(level) - run;
      const uint32_t later = ~0u << (from - run), there = left < kRun ? (1u << left) - 1 : ~0u;
      const uint32_t found = bits_below(own + run, limit) & later & there;
      if (found && level == 0) {
        const int64_t entry = run + first_bit(found);
        return entry < until ? entry : until;
      }
      if (found) {
        from = (run + first_bit(found)) << kRunBits;
        own -= whole_runs(--level);
      } else if (level + 1 < levels) {
        from = (run >> kRunBits) + 1;
        own += whole_runs(level++);
      } else {
        from = run + kRun;
      }
    }
    return until;
  }

 private:
  /// Each level takes whole runs, which are loaded at once; what lies behind its last entry is not looked at.
  FLASHMASK_COLUMN int64_t whole_runs(int level) const { return count_of(level + 1) << kRunBits; }
  FLASHMASK_COLUMN int64_t words_below(int level) const {
    int64_t words_of_all = 0;
    for (int below = 0; below < level; ++below) words_of_all += whole_runs(below);
    return words_of_all;
  }

  /// Bit k: entry k of a run is less than the limit.
  FLASHMASK_COLUMN static uint32_t bits_below(const int32_t* run, int32_t limit) {
    uint32_t bits = 0;
    FLASHMASK_UNROLL
    for (int k = 0; k < kRun; k += 4) {
#if defined(__CUDA_ARCH__)
      const int4 four = *reinterpret_cast<const int4*>(run + k);
      const int32_t entries[] = {four.x, four.y, four.z, four.w};
#else
      const int32_t* const entries = run + k;
#endif
      for (int n = 0; n < 4; ++n) bits |= static_cast<uint32_t>(entries[n] < limit) << (k + n);
    }
    return bits;
  }
  FLASHMASK_COLUMN static int first_bit(uint32_t bits) {
#if defined(__CUDA_ARCH__)
    return __ffs(static_cast<int>(bits)) - 1;
#else
    return __builtin_ctz(bits);
#endif
  }
};

}  // namespace flashmask::build
