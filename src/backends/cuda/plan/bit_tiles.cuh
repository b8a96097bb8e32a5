// SPDX-License-Identifier: Apache-2.0
#pragma once

// The last kernels of the planner for masks with interval lists: number the partial granules, and write the tile of
// each, and how far the visible elements of each batch entry reach.

#include <cstdint>

#include "backends/cuda/plan/extents.cuh"
#include "backends/cuda/plan/lists.cuh"
#include "backends/cuda/plan/params.cuh"
#include "mask/list_rows.h"

namespace flashmask::cuda::plan {

inline constexpr int kNumberThreads = 1024;  // the only block's
inline constexpr int kNumberWords = 4;       // a thread's at a time

/// The sum over the threads before the calling one, and in `total` over all.
__device__ inline int32_t sum_before(int32_t value, int32_t (&of_warps)[kNumberThreads / 32], int32_t& total) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto sum_up = [lane](int32_t sum) {
#pragma unroll
    for (uint32_t distance = 1; distance < 32; distance *= 2) {
      const int32_t before = __shfl_up_sync(0xffffffff, sum, distance);
      if (lane >= distance) sum += before;
    }
    return sum;
  };
  const int32_t sum = sum_up(value);
  if (lane == 31) of_warps[warp] = sum;
  __syncthreads();
  const int32_t warps = sum_up(of_warps[lane]);
  total = __shfl_sync(0xffffffff, warps, 31);
  const int32_t before = __shfl_sync(0xffffffff, warps, (warp + 31) % 32);
  __syncthreads();
  return sum - value + (warp > 0 ? before : 0);
}

/// Writes how many tiles come before each word of the row granules' bits: by one block, in turns.
__device__ __forceinline__ void number_tiles(const Params& p) {
  static_assert(kNumberThreads == 32 * 32);
  __shared__ int32_t of_warps[kNumberThreads / 32];
  wait_for_previous();
  const auto* live = p.at<uint32_t>(p.layout.row_live);
  const auto* full = p.at<uint32_t>(p.layout.row_full);
  auto* tiles_before = p.at<int32_t>(p.layout.tiles_before);
  const int64_t words = p.layout.batch * p.layout.heads * p.layout.row_granules * p.layout.words_per_row * 2;
  int32_t done = 0;
  for (int64_t begin = 0; begin < words; begin += kNumberThreads * kNumberWords) {
    const int64_t first = begin + threadIdx.x * kNumberWords;
    int32_t count[kNumberWords], own = 0;
#pragma unroll
    for (int n = 0; n < kNumberWords; ++n) {
      count[n] = first + n < words ? __popc(live[first + n] & ~full[first + n]) : 0;
      own += count[n];
    }
    int32_t total;
    int32_t before = done + sum_before(own, of_warps, total);
#pragma unroll
    for (int n = 0; n < kNumberWords; ++n) {
      if (first + n < words) tiles_before[first + n] = before;
      before += count[n];
    }
    done += total;
  }
  if (threadIdx.x != 0) return;
  tiles_before[words] = done;
  if ((words + 1) % 2 != 0) tiles_before[words + 1] = 0;  // left by rounding up to 8 bytes
}

/// The number of partial granule (m, r, c)'s tile.
__device__ inline int32_t tile_number(const Params& p, int32_t m, int32_t r, int32_t c) {
  const int64_t word = (int64_t{m} * p.row_granules + r) * p.layout.words_per_row * 2 + c / 32;
  const uint32_t partial = p.at<uint32_t>(p.layout.row_live)[word] & ~p.at<uint32_t>(p.layout.row_full)[word];
  return p.at<int32_t>(p.layout.tiles_before)[word] + __popc(partial & rules::low_bits<uint32_t>(c % 32));
}

/// Writes the tiles of a key block's word of row granules, a key by each thread, and extends the zeroed `extents`. A
/// block for every word of every key block of every mask. Tiles that there is no room for are left out.
__device__ __forceinline__ void write_tiles(const Params& p, const PositionBand& band, VisibleExtent* extents) {
  __shared__ int32_t numbers[kGranulesOfWord];
  wait_for_previous();
  const ListPlace at(p);
  const int64_t word = at.index * p.layout.words_per_key * 2 + at.word;
  const uint32_t live = p.at<uint32_t>(p.layout.key_live)[word],
                 partial = live & ~p.at<uint32_t>(p.layout.key_full)[word];
  if (live == 0) return;
  if (threadIdx.x < 32 && (partial >> threadIdx.x & 1) != 0)
    numbers[threadIdx.x] = tile_number(p, at.m, at.word * kGranulesOfWord + static_cast<int32_t>(threadIdx.x), at.c);
  __syncthreads();
  const int32_t b = at.m / p.heads;
  const rules::PositionBand positions = positions_of(p, band, b);
  rules::ListedRows rows = at.rows(p);
  auto* tiles = p.at<uint64_t>(p.layout.tile_bits);
  int32_t last_row = -1;
  for (uint32_t left = live; left; left &= left - 1) {
    const int32_t g = __ffs(static_cast<int>(left)) - 1, row = at.first_row() + g * static_cast<int32_t>(kGranuleRows);
    const auto rows_there = min(static_cast<int32_t>(p.mask.seqlen_q) - row, static_cast<int32_t>(kGranuleRows));
    if ((partial >> g & 1) == 0) {
      last_row = row + rows_there - 1;
      continue;
    }
    const uint64_t seen = at.exists ? rules::rows_in_band(positions, at.key, row, rows.next(row)) : 0;
    if (seen != 0) last_row = row + 63 - __clzll(static_cast<long long>(seen));
    if (numbers[g] < p.layout.bit_tiles) tiles[numbers[g] * kBitTileWords + threadIdx.x] = seen;
  }
  const bool sees = at.exists && last_row >= 0;
  const int32_t last = __reduce_max_sync(0xffffffff, sees ? last_row + 1 : 0),
                keys = __reduce_max_sync(0xffffffff, sees ? at.key + 1 : 0);
  if (threadIdx.x % 32 != 0 || keys == 0) return;
  atomicMax(&extents[b].rows, last);
  atomicMax(&extents[b].keys, keys);
}

}  // namespace flashmask::cuda::plan
