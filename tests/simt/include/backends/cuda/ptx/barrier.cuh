// SPDX-License-Identifier: Apache-2.0
#pragma once

// In place of the header of this name, without the barriers in shared memory, which kernels before Hopper do not have.

#include <cstdint>

#include "backends/cuda/ptx/address.cuh"
#include "backends/cuda/ptx/registers.cuh"
#include "simt/device.h"

namespace flashmask::ptx {

inline void named_barrier_sync(int id, int threads, simt::Place place = simt::Place::current()) {
  simt::barrier("bar.sync", id, threads, true, place);
}
inline void named_barrier_arrive(int id, int threads, simt::Place place = simt::Place::current()) {
  simt::barrier("bar.arrive", id, threads, false, place);
}

/// Pauses, so that a polling thread lets the threads run that it waits for.
inline uint32_t load_acquire(const uint32_t* global, simt::Place place = simt::Place::current()) {
  simt::pause("ld.acquire", place);
  return *global;
}
inline void add_release(uint32_t* global, uint32_t value) { *global += value; }

}  // namespace flashmask::ptx
