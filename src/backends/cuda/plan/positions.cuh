// SPDX-License-Identifier: Apache-2.0
#pragma once

// After the first kernel of the planner, where masks have positions: clears the bits of granules that these rule out,
// by their minima and maxima, and adds what they add to the mask's hash.

#include <cstdint>

#include "backends/cuda/plan/params.cuh"
#include "mask/content_hash.h"
#include "mask/rules.h"

namespace flashmask::cuda::plan {

inline constexpr int kPositionThreads = kGranuleKeys;  // a thread reads a key's position, and a warp a granule's
inline constexpr int kPositionWarps = kPositionThreads / 32;

/// The least and the greatest position of the calling warp's threads.
__device__ inline rules::PositionRange warp_range(rules::PositionRange own) {
  return {__reduce_min_sync(0xffffffff, own.least), __reduce_max_sync(0xffffffff, own.greatest)};
}

/// One key block of one mask, by one thread block.
class PositionBlock {
 public:
  __device__ PositionBlock(const Params& p, const PositionBand& band, int32_t m, int32_t c)
      : p_(p), band_{band.lo, band.hi}, index_(int64_t{m} * p.key_blocks + c) {
    const int32_t b = m / p.heads;
    const bool first_head = m % p.heads == 0;
    q_first_ = b / band.q_group * p.mask.seqlen_q;
    k_first_ = b / band.k_group * p.mask.seqlen_k;
    // Each position is hashed once: by the first mask that has it, a row's with the first key block.
    hashes_rows_ = first_head && b % band.q_group == 0 && c == 0;
    hashes_keys_ = first_head && b % band.k_group == 0;
  }

  /// The position of the calling thread's key; empty past the last key.
  __device__ rules::PositionRange key_range(int32_t key) {
    if (key >= p_.mask.seqlen_k) return {};
    const int32_t position = p_.mask.k_pos[k_first_ + key];
    if (hashes_keys_) hash(content_hash::Source::kKPos, k_first_ + key, position);
    return rules::with({}, position);
  }

  /// 32 granules from 32 * `word` on, by the calling warp.
  __device__ void judge(int32_t word, rules::PositionRange keys) {
    uint32_t some = 0, all = 0;
#pragma unroll 4
    for (int n = 0; n < 32; ++n) {
      const rules::PositionRange rows = warp_range(row_range(word * 32 + n));
      some |= static_cast<uint32_t>(rules::some_in_band(band_, rows, keys)) << n;
      all |= static_cast<uint32_t>(rules::all_in_band(band_, rows, keys)) << n;
    }
    if (threadIdx.x % 32 != 0) return;
    const int64_t at = index_ * p_.layout.words_per_key * 2 + word;
    uint32_t& live = p_.at<uint32_t>(p_.layout.key_live)[at];
    live &= some;
    p_.at<uint32_t>(p_.layout.key_full)[at] &= all;
    live_granules_ += __popc(live);
  }

  /// Adds up over the threads and writes the sums.
  __device__ void write_sums(int32_t (&of_warps)[kPositionWarps], uint64_t (&hash_of_warps)[kPositionWarps]) {
    auto sum = static_cast<unsigned long long>(hash_);
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffff, sum, distance);
    if (threadIdx.x % 32 == 0) {
      of_warps[threadIdx.x / 32] = live_granules_;
      hash_of_warps[threadIdx.x / 32] = sum;
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    p_.at<int32_t>(p_.layout.key_counts)[index_] = of_warps[0] + of_warps[1] + of_warps[2] + of_warps[3];
    p_.at<uint64_t>(p_.layout.scratch)[index_] +=
        hash_of_warps[0] + hash_of_warps[1] + hash_of_warps[2] + hash_of_warps[3];
  }

 private:
  /// The positions of the calling lane's two rows of a granule; empty past the last row.
  __device__ rules::PositionRange row_range(int32_t granule) {
    rules::PositionRange range;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int64_t row = int64_t{granule} * kGranuleRows + 32 * n + threadIdx.x % 32;
      if (row >= p_.mask.seqlen_q) continue;
      const int32_t position = p_.mask.q_pos[q_first_ + row];
      range = rules::with(range, position);
      if (hashes_rows_) hash(content_hash::Source::kQPos, q_first_ + row, position);
    }
    return range;
  }
  __device__ void hash(content_hash::Source source, int64_t at, int32_t position) {
    hash_ += content_hash::element(source, at, static_cast<uint32_t>(position));
  }

  static_assert(kGranuleRows == 64 && kPositionWarps == 4);
  const Params& p_;
  const rules::PositionBand band_;
  const int64_t index_;
  int64_t q_first_, k_first_;
  bool hashes_rows_, hashes_keys_;
  int32_t live_granules_ = 0;
  uint64_t hash_ = 0;
};

/// A block for every key block of every mask. A granule without rows is not live and not full before.
__device__ __forceinline__ void positions(const Params& p, const PositionBand& band) {
  allow_next();
  __shared__ rules::PositionRange ranges[kPositionWarps];
  __shared__ int32_t of_warps[kPositionWarps];
  __shared__ uint64_t hash_of_warps[kPositionWarps];
  const auto index = static_cast<int32_t>(blockIdx.x);
  const int32_t c = index % p.key_blocks, warp = static_cast<int32_t>(threadIdx.x / 32);
  PositionBlock block(p, band, index / p.key_blocks, c);
  const rules::PositionRange own =
      warp_range(block.key_range(c * static_cast<int32_t>(kGranuleKeys) + static_cast<int32_t>(threadIdx.x)));
  if (threadIdx.x % 32 == 0) ranges[warp] = own;
  __syncthreads();
  rules::PositionRange keys;
#pragma unroll
  for (const rules::PositionRange& range : ranges)
    keys = {min(keys.least, range.least), max(keys.greatest, range.greatest)};
  wait_for_previous();
  for (int32_t word = warp; word * 32 < p.row_granules; word += kPositionWarps) block.judge(word, keys);
  block.write_sums(of_warps, hash_of_warps);
}

}  // namespace flashmask::cuda::plan
