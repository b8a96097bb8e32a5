// SPDX-License-Identifier: Apache-2.0
#pragma once

// The hidden rows of a key column. Runs on the host and on devices.

#include "mask/families/integers.h"

namespace flashmask::build {

inline constexpr int64_t kToEnd = INT64_MAX;
/// Farther than any key or block; products of two do not overflow.
inline constexpr int64_t kFarthest = INT32_MAX;

/// The intervals [lts, lte) and [uts, ute) of a column, to be clamped to the rows. As it stands nothing is hidden.
struct Column {
  int64_t lts = kToEnd, lte = kToEnd, uts = 0, ute = 0;
};

/// Seen by the rows from `begin` to `end` alone.
FLASHMASK_COLUMN Column seen_by(int64_t begin, int64_t end) { return {.lts = end, .ute = begin}; }

FLASHMASK_COLUMN int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
FLASHMASK_COLUMN int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
/// a % b of tokens, which 32 bits hold.
FLASHMASK_COLUMN int64_t remainder(int64_t a, int64_t b) { return static_cast<uint32_t>(a) % static_cast<uint32_t>(b); }

}  // namespace flashmask::build
