// SPDX-License-Identifier: Apache-2.0
#pragma once

// In place of the header of this name, without the barriers in shared memory, which kernels before Hopper do not have.

#include <cstdint>

#include "simt/device.h"

namespace flashmask::ptx {

inline uint32_t add_acquire_release(uint32_t* global, uint32_t value) { return atomicAdd(global, value); }

}  // namespace flashmask::ptx
