// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace flashmask {

/// Neighbouring granules [begin, end) of a line of a plan: key blocks of a row granule, or row granules of a key block.
struct alignas(8) GranuleRun {
  int32_t begin = 0, end = 0;

  bool operator==(const GranuleRun&) const = default;
};

/// Room of a line in a plan in runs. Runs ascend with gaps between; what is left over is zeros.
inline constexpr int32_t kLineRuns = 8;

}  // namespace flashmask
