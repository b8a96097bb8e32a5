// SPDX-License-Identifier: Apache-2.0
#pragma once

// In place of the header of this name.

#include <cstdint>

#include "backends/cuda/ptx/address.cuh"
#include "simt/device.h"

namespace flashmask::ptx {

inline void add_four(float* global, const float* values, simt::Place place = simt::Place::current()) {
  if (reinterpret_cast<std::uintptr_t>(global) % 16 != 0)
    simt::fail("red", place, "the address is not aligned to 16 bytes");
  for (int n = 0; n < 4; ++n) global[n] += values[n];
}

}  // namespace flashmask::ptx
