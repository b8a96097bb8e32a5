// SPDX-License-Identifier: Apache-2.0
#pragma once

// The third kernel of the planner: the orders, longest first, and the header.

#include <climits>
#include <cstdint>

#include "backends/cuda/plan/params.cuh"
#include "mask/content_hash.h"

namespace flashmask::cuda::plan {

inline constexpr int kRankThreads = 256;
inline constexpr int kRankItems = 32;    // items whose places a block works out, one for each lane
inline constexpr int kRankChunk = 2048;  // counts in shared memory at a time

/// One of a mask's orders: where the counts of its items are and where their order goes.
struct Order {
  int32_t items;
  int64_t counts, order;

  __host__ __device__ int32_t blocks() const { return items / kRankItems + (items % kRankItems != 0); }
};

inline constexpr int kOrders = 3;

__host__ __device__ inline Order order_of(const PlanLayout& layout, int n) {
  switch (n) {
    case 0:
      return {static_cast<int32_t>(layout.key_blocks), layout.key_counts, layout.key_order};
    case 1:
      return {static_cast<int32_t>(layout.row_tiles_128), layout.row_tile_counts_128, layout.row_tile_order_128};
    default:
      return {static_cast<int32_t>(layout.row_tiles_192), layout.row_tile_counts_192, layout.row_tile_order_192};
  }
}

/// Adds to the rank of the calling lane's item, which is number threadIdx.x % 32 of group `own` and has `count`: how
/// many of the 32 counts of group `group` come before it. A larger count does, and an equal one of an earlier item.
__device__ inline int32_t count_before(const int32_t* counts, int32_t group, int32_t own, int32_t count) {
  const auto* fours = reinterpret_cast<const int4*>(counts);
  int32_t before = 0;
  if (group == own) {
    const auto lane = static_cast<int32_t>(threadIdx.x % 32);
    for (int32_t k = 0; k < 32; ++k) before += counts[k] > count || (counts[k] == count && k < lane);
    return before;
  }
  const int32_t bound = group < own ? count - 1 : count;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const int4 four = fours[n];
    before += (four.x > bound) + (four.y > bound) + (four.z > bound) + (four.w > bound);
  }
  return before;
}

/// Puts 32 items where they belong: an item's place is the number of items before it. That takes a comparison for
/// every pair of items, about as many as a square mask has granules, and there is no order in which threads must take
/// turns, whatever the counts.
__device__ inline void rank_items(const int32_t* counts, int32_t items, int32_t own, int32_t* order) {
  __shared__ __align__(16) int32_t chunk[kRankChunk];
  __shared__ int32_t ranks[kRankItems];
  const auto thread = static_cast<int32_t>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int32_t item = own * kRankItems + lane;
  const int32_t count = item < items ? counts[item] : 0;
  if (thread < kRankItems) ranks[thread] = 0;
  int32_t rank = 0;
  for (int32_t begin = 0; begin < items; begin += kRankChunk) {
    __syncthreads();
#pragma unroll
    for (int32_t n = 0; n < kRankChunk / kRankThreads; ++n) {
      const int32_t k = n * kRankThreads + thread;
      chunk[k] = k < items - begin ? counts[begin + k] : INT_MIN;
    }
    __syncthreads();
    for (int32_t at = warp * 32; at < min(kRankChunk, items - begin); at += kRankThreads)
      rank += count_before(chunk + at, (begin + at) / 32, own, count);
  }
  atomicAdd(&ranks[lane], rank);
  __syncthreads();
  if (warp == 0 && item < items) order[ranks[lane]] = item;
}

/// Zeroes what rounding up to 8 bytes left behind a part of int32.
__device__ inline void clear_padding(const Params& p, int64_t part, int64_t items) {
  const int64_t count = p.layout.batch * p.layout.heads * items;
  if (count % 2 != 0) p.at<int32_t>(part)[count] = 0;
}

/// Adds up the contents' hash and writes the header.
__device__ inline void write_header(const Params& p) {
  __shared__ uint64_t of_warps[kRankThreads / 32];
  auto* parts = p.at<uint64_t>(p.layout.scratch);
  const int64_t count = p.layout.batch * p.layout.heads * p.layout.key_blocks;
  unsigned long long sum = 0;
#pragma unroll 4
  for (int64_t n = threadIdx.x; n < count; n += kRankThreads) sum += parts[n];
  for (int64_t n = threadIdx.x; n < count; n += kRankThreads) parts[n] = 0;
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffff, sum, distance);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x < kOrders) {
    const Order order = order_of(p.layout, static_cast<int>(threadIdx.x));
    clear_padding(p, order.counts, order.items);
    clear_padding(p, order.order, order.items);
  }
  if (threadIdx.x != 0) return;
  clear_padding(p, p.layout.row_counts, p.layout.row_granules);
  uint64_t elements = 0;
  for (const uint64_t part : of_warps) elements += part;
  PlanHeader header = p.header;
  header.mask_hash = content_hash::finish(p.header.mask_hash, elements);
  *p.at<PlanHeader>(0) = header;
}

/// The first block writes the header, the others 32 places each of one order of one mask.
__device__ __forceinline__ void rank(const Params& p, int32_t blocks_per_mask) {
  wait_for_previous();
  if (blockIdx.x == 0) return write_header(p);
  const auto index = static_cast<int32_t>(blockIdx.x) - 1;
  const int32_t m = index / blocks_per_mask;
  int32_t block = index % blocks_per_mask;
  int which = 0;
  Order order = order_of(p.layout, which);
  while (block >= order.blocks()) {
    block -= order.blocks();
    order = order_of(p.layout, ++which);
  }
  rank_items(p.at<int32_t>(order.counts) + int64_t{m} * order.items, order.items, block,
             p.at<int32_t>(order.order) + int64_t{m} * order.items);
}

}  // namespace flashmask::cuda::plan
