// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace flashmask::cuda {

/// Words of Arrivals::state: how many pieces have arrived, and 0 or the piece that did not come in time.
enum ArrivalWord { kArrived, kMissing };

/// More pieces than there are.
constexpr uint32_t kNoMoreWaits = 0xffffffff;

/// Seconds in units of ptx::coarse_time, at least one.
constexpr uint32_t wait_limit(double seconds) { return static_cast<uint32_t>(seconds * 1e9 / (1 << 20)) + 1; }

/// Keys that arrive while a kernel runs: Arrivals in attention.h.
struct ArrivalParams {
  const uint32_t* needed;  ///< pieces before each 128 keys of an entry may be read; null: all keys are there
  uint32_t entry_stride;   ///< 0: the same for all entries
  uint32_t* state;
  uint32_t limit;  ///< longest wait, in units of ptx::coarse_time
};

}  // namespace flashmask::cuda
