// SPDX-License-Identifier: Apache-2.0
#pragma once

// In place of the header of this name: copies that come as late as they may.

#include <cstdint>

#include "backends/cuda/ptx/address.cuh"
#include "simt/device.h"

namespace flashmask::ptx {

inline void cp_async_16(uint32_t shared, const void* global, bool inside, simt::Place place = simt::Place::current()) {
  simt::copy_async(shared, global, inside, place);
}
inline void cp_async_commit() { simt::commit_copies(); }
template <int kPending>
void cp_async_wait() {
  simt::wait_for_copies(kPending);
}

}  // namespace flashmask::ptx
