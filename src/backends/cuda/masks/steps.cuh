// SPDX-License-Identifier: Apache-2.0
#pragma once

// The steps of a mask's build on a device; see mask/families/steps.h. Each kernel lets the next one be launched at
// once, which then waits until it is done.

#include <cub/block/block_scan.cuh>

#include "backends/cuda/device/launch_overlap.cuh"
#include "mask/families/minima.h"

namespace flashmask::cuda::masks {

inline constexpr int kThreads = 256;
inline constexpr int kBlocks = 3;  ///< per multiprocessor, at least; more would leave too few registers for loads
inline constexpr int kScanItems = 4;
inline constexpr int64_t kTile = kThreads * kScanItems;

/// Everything on the stream before is done and visible after it.
__device__ inline void begin_step() {
  allow_next();
  wait_for_previous();
}

__global__ void __launch_bounds__(kThreads, kBlocks) clear(int4* words, int64_t count) {
  begin_step();
  const int64_t n = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (n < count) words[n] = {};
}

/// blocks_per_lead blocks for each lead. A thread does `neighbours` entries, which mostly share a segment.
template <typename F>
__global__ void __launch_bounds__(kThreads, kBlocks)
    each(const __grid_constant__ F f, build::Leads leads, int64_t count, uint32_t blocks_per_lead, int neighbours) {
  begin_step();
  const build::Lead lead = leads[blockIdx.x / blocks_per_lead];
  const int64_t first = (int64_t{blockIdx.x % blocks_per_lead} * kThreads + threadIdx.x) * neighbours;
  const F own = f;
#pragma unroll 1
  for (int64_t n = first; n < first + neighbours && n < count; ++n) own(lead, n);
}

/// How a scan's entries are divided: a block for each part of a lead, several tiles if there are very many.
struct Parts {
  int64_t count, length;
  uint32_t per_lead;
};

/// The entries of a block, and how its threads go through them, each a few neighbours at a time.
struct Part {
  build::Lead lead;
  int64_t begin, end;
  __device__ Part(const build::Leads& leads, const Parts& parts)
      : lead(leads[blockIdx.x / parts.per_lead]), begin(blockIdx.x % parts.per_lead * parts.length) {
    end = begin + parts.length < parts.count ? begin + parts.length : parts.count;
  }
  __device__ int64_t first_of(int64_t tile) const { return tile + threadIdx.x * kScanItems; }
};

using Scan = cub::BlockScan<int64_t, kThreads>;

/// The sum of all threads' values, which every thread gets.
__device__ inline int64_t sum_of(Scan::TempStorage& storage, int64_t own) {
  int64_t before, total;
  Scan(storage).ExclusiveSum(own, before, total);
  return total;
}

template <typename F>
__device__ void prepare(const F& f, const Part& part) {
  for (int64_t n = part.begin + threadIdx.x; n < part.end; n += kThreads) f.prepare(part.lead, n);
}

/// Before a scan in several parts: the sum of each.
template <typename F>
__global__ void __launch_bounds__(kThreads, kBlocks)
    sums(const __grid_constant__ F f, build::Leads leads, Parts parts, int64_t* sums_of_parts) {
  __shared__ typename Scan::TempStorage storage;
  begin_step();
  const Part part(leads, parts);
  const F own = f;
  int64_t sum = 0;
  for (int64_t tile = part.begin; tile < part.end; tile += kTile) {
#pragma unroll
    for (int64_t n = part.first_of(tile); n < part.first_of(tile) + kScanItems; ++n)
      sum += n < part.end ? own.value(part.lead, n) : 0;
  }
  prepare(own, part);
  sum = sum_of(storage, sum);
  if (threadIdx.x == 0) sums_of_parts[blockIdx.x] = sum;
}

/// Each block adds up the sums of the parts before its own: they are few, and no block waits for another.
template <typename F>
__global__ void __launch_bounds__(kThreads, kBlocks)
    scan(const __grid_constant__ F f, build::Leads leads, Parts parts, const int64_t* sums_of_parts) {
  __shared__ typename Scan::TempStorage storage;
  begin_step();
  const Part part(leads, parts);
  const F own = f;
  int64_t before = 0;
  if (parts.per_lead == 1) {
    prepare(own, part);
  } else {
    const uint32_t number = blockIdx.x % parts.per_lead;
    for (uint32_t n = threadIdx.x; n < number; n += kThreads) before += sums_of_parts[blockIdx.x - number + n];
    before = sum_of(storage, before);
  }
  for (int64_t tile = part.begin; tile < part.end; tile += kTile) {
    const int64_t first = part.first_of(tile);
    int64_t values[kScanItems], found[kScanItems], total = 0;
#pragma unroll
    for (int n = 0; n < kScanItems; ++n) values[n] = first + n < part.end ? own.value(part.lead, first + n) : 0;
    __syncthreads();  // everything is prepared, and the storage is used again
    Scan(storage).InclusiveSum(values, found, total);
#pragma unroll
    for (int n = 0; n < kScanItems; ++n) {
      if (first + n < part.end) own.store(part.lead, first + n, values[n], before + found[n]);
    }
    before += total;
  }
}

/// A block for each tile of a lead. A run lies in eight neighbouring threads, a tile is a run of runs.
template <typename F>
__global__ void __launch_bounds__(kThreads, kBlocks)
    minima(const __grid_constant__ F f, build::Leads leads, int64_t count, uint32_t tiles) {
  constexpr int kRun = build::Minima::kRun, kWarp = 32;
  static_assert(kTile == kRun * kRun && kWarp % (kRun / kScanItems) == 0);
  __shared__ int32_t least_of_warp[kThreads / kWarp];
  begin_step();
  const build::Lead lead = leads[blockIdx.x / tiles];
  const int64_t tile = blockIdx.x % tiles, first = tile * kTile + threadIdx.x * kScanItems;
  int32_t least = INT32_MAX;
#pragma unroll
  for (int n = 0; n < kScanItems; ++n) least = min(least, first + n < count ? f.value(lead, first + n) : INT32_MAX);
#pragma unroll
  for (int lanes = 1; lanes < kWarp; lanes *= 2) {
    if (lanes == kRun / kScanItems && threadIdx.x % lanes == 0 && first < count) f.store(lead, 1, first / kRun, least);
    least = min(least, __shfl_xor_sync(~0u, least, lanes));
  }
  if (threadIdx.x % kWarp == 0) least_of_warp[threadIdx.x / kWarp] = least;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (const int32_t other : least_of_warp) least = min(least, other);
  f.store(lead, 2, tile, least);
}

}  // namespace flashmask::cuda::masks
