// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/sm80/tile_config.h"

namespace flashmask::sm80 {

/// Kilobytes of shared memory that a multiprocessor of a compute capability has for its blocks. One block may have all
/// but one kilobyte.
constexpr int multiprocessor_kilobytes(int major, int minor) {
  if (major == 8 && (minor == 0 || minor == 7)) return kLargeKilobytes + 1;
  return 9 <= major && major < 12 ? 228 : kSmallKilobytes + 1;
}

}  // namespace flashmask::sm80
