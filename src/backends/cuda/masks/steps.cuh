// SPDX-License-Identifier: Apache-2.0
#pragma once

// The steps of a mask's build on a device; see mask/build/build-inl.h.

#include <cub/block/block_scan.cuh>

#include "mask/build/integers.h"

namespace flashmask::cuda::masks {

inline constexpr int kEachThreads = 256;
inline constexpr int kEachItems = 4;  ///< per thread: its entries are neighbours, which mostly share a segment
inline constexpr int kScanThreads = 512;
inline constexpr int kScanItems = 4;

/// blocks_per_lead blocks for each lead.
template <typename F>
__global__ void __launch_bounds__(kEachThreads)
    each(const __grid_constant__ F f, build::Leads leads, int64_t count, uint32_t blocks_per_lead) {
  cudaGridDependencySynchronize();
  const build::Lead lead = leads[blockIdx.x / blocks_per_lead];
  const int64_t first = (int64_t{blockIdx.x % blocks_per_lead} * kEachThreads + threadIdx.x) * kEachItems;
  const F own = f;
#pragma unroll 1
  for (int64_t n = first; n < first + kEachItems && n < count; ++n) own(lead, n);
}

/// A block for each lead.
template <typename F>
__global__ void __launch_bounds__(kScanThreads) scan(const __grid_constant__ F f, build::Leads leads, int64_t count) {
  using Scan = cub::BlockScan<int64_t, kScanThreads>;
  __shared__ typename Scan::TempStorage storage;
  cudaGridDependencySynchronize();
  const build::Lead lead = leads[blockIdx.x];
  const F own = f;
  int64_t before = 0;
  for (int64_t begin = 0; begin < count; begin += kScanThreads * kScanItems) {
    const int64_t first = begin + threadIdx.x * kScanItems;
    int64_t values[kScanItems], sums[kScanItems], total = 0;
#pragma unroll
    for (int n = 0; n < kScanItems; ++n) values[n] = first + n < count ? own.value(lead, first + n) : 0;
    Scan(storage).InclusiveSum(values, sums, total);
#pragma unroll
    for (int n = 0; n < kScanItems; ++n) {
      if (first + n < count) own.store(lead, first + n, values[n], before + sums[n]);
    }
    before += total;
    __syncthreads();  // the storage is used again
  }
}

}  // namespace flashmask::cuda::masks
