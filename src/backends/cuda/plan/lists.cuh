// SPDX-License-Identifier: Apache-2.0
#pragma once

// In place of the planner's first kernel, for masks with interval lists: which lists ascend, and the class of every
// granule from the rows that its columns' lists and the band leave visible.

#include <climits>
#include <cstdint>

#include "backends/cuda/plan/classify.cuh"
#include "backends/cuda/plan/params.cuh"
#include "mask/content_hash.h"
#include "mask/list_rows.h"
#include "mask/rules.h"

namespace flashmask::cuda::plan {

inline constexpr int kReadThreads = 1024;  // many warps, as reading lists takes long
inline constexpr int kReadWarps = kReadThreads / 32;
inline constexpr int kReadColumns = kGranuleKeys / kReadWarps;  // a warp's
inline constexpr int kListThreads = kGranuleKeys;               // a thread for each column of a key block
inline constexpr int kGranulesOfWord = 32;                      // row granules of a block: a word of a key block's bits
inline constexpr int kAscendingWords = kGranuleKeys / 32;
static_assert(kReadColumns <= 32 && 32 % kReadColumns == 0);

/// The lists that serve mask `m`.
__device__ inline rules::IntervalLists lists_of(const Params& p, int32_t m) {
  const int64_t first = own_of(p, m, p.bounds).index * (p.mask.seqlen_k + 1);
  return {p.mask.column_ptr + first, p.mask.intervals, p.mask.listed_intervals};
}

/// Reads the lists of kReadColumns columns, a warp's: whether each ascends, and what they add to the mask's hash.
class WarpLists {
 public:
  __device__ WarpLists(const Params& p, int32_t m, int32_t first_key)
      : p_(p), lists_(lists_of(p, m)), first_key_(first_key) {
    const Own own = own_of(p, m, p.bounds);
    hashes_ = own.first;
    first_end_ = own.index * (p.mask.seqlen_k + 1);
    ends_ = p.mask.bounds_batch * p.mask.bounds_heads * (p.mask.seqlen_k + 1);
  }

  /// Returns a bit for each column.
  __device__ uint32_t read() {
    const auto lane = static_cast<int32_t>(threadIdx.x % 32), columns = columns_here();
    rules::Interval numbers{0, 0};
    if (lane < columns) {
      numbers = rules::listed_numbers(lists_, first_key_ + lane);
      hash_end(first_key_ + lane);
      if (first_key_ + lane == p_.mask.seqlen_k - 1) hash_end(p_.mask.seqlen_k);
    }
    uint32_t ascending = 0;
    for (int32_t column = 0; column < columns; ++column) {
      const rules::Interval of_column{__shfl_sync(0xffffffff, numbers.begin, column),
                                      __shfl_sync(0xffffffff, numbers.end, column)};
      if (__all_sync(0xffffffff, ascends(of_column))) ascending |= 1u << column;
    }
    return ascending;
  }
  __device__ uint64_t hash() const { return hash_; }

 private:
  __device__ int32_t columns_here() const {
    const int64_t left = p_.mask.seqlen_k - first_key_;
    return static_cast<int32_t>(left < 0 ? 0 : left < kReadColumns ? left : kReadColumns);
  }

  /// True if the intervals that the calling lane reads do.
  __device__ bool ascends(rules::Interval numbers) {
    bool ascends = true;
    for (int32_t n = numbers.begin + static_cast<int32_t>(threadIdx.x % 32); n < numbers.end; n += 32) {
      const rules::Interval own = rules::listed_interval(lists_, n);
      const int32_t end_before = n > numbers.begin ? rules::listed_interval(lists_, n - 1).end : INT_MIN;
      ascends = ascends && rules::ascends_from(end_before, own);
      if (!hashes_) continue;
      hash(ends_ + 2 * int64_t{n}, own.begin);
      hash(ends_ + 2 * int64_t{n} + 1, own.end);
    }
    return ascends;
  }

  __device__ void hash_end(int64_t key) {
    if (hashes_) hash(first_end_ + key, lists_.column_ptr[key]);
  }
  __device__ void hash(int64_t at, int32_t value) {
    hash_ += content_hash::element(content_hash::Source::kIntervalLists, at, static_cast<uint32_t>(value));
  }

  const Params& p_;
  rules::IntervalLists lists_;
  int32_t first_key_;
  bool hashes_;
  int64_t first_end_, ends_;  ///< column_ptr's elements before the lists', and all: a hash counts these first
  uint64_t hash_ = 0;
};

/// A block for every key block of every mask, at least one.
__device__ __forceinline__ void read_lists(const Params& p) {
  allow_next();
  clear_row_counts(p);
  if (p.key_blocks == 0) return;

  __shared__ uint32_t ascending[kAscendingWords];
  __shared__ unsigned long long hash;
  const auto index = static_cast<int32_t>(blockIdx.x), warp = static_cast<int32_t>(threadIdx.x / 32);
  if (threadIdx.x < kAscendingWords) ascending[threadIdx.x] = 0;
  if (threadIdx.x == 0) hash = 0;
  __syncthreads();
  const int32_t first_column = warp * kReadColumns;
  WarpLists lists(p, index / p.key_blocks, index % p.key_blocks * static_cast<int32_t>(kGranuleKeys) + first_column);
  const uint32_t of_warp = lists.read();
  auto sum = static_cast<unsigned long long>(lists.hash());
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffff, sum, distance);
  if (threadIdx.x % 32 == 0) {
    atomicOr(&ascending[first_column / 32], of_warp << first_column % 32);
    atomicAdd(&hash, sum);
  }
  __syncthreads();
  if (threadIdx.x < kAscendingWords)
    p.at<uint32_t>(p.layout.ascending_lists)[int64_t{index} * kAscendingWords + threadIdx.x] = ascending[threadIdx.x];
  if (threadIdx.x != 0) return;
  p.at<int32_t>(p.layout.key_counts)[index] = 0;
  p.at<uint64_t>(p.layout.scratch)[index] = hash;
}

/// The place of a block of threads, 32 row granules of a key block, and the calling thread's column.
struct ListPlace {
  int32_t m, c, word;  ///< mask, key block, word of its bits
  int64_t index;       ///< the key block's, over all masks
  int32_t key;
  bool exists;  ///< the column

  __device__ explicit ListPlace(const Params& p) {
    const auto words = static_cast<int32_t>(p.layout.words_per_key) * 2;
    const auto block = static_cast<int32_t>(blockIdx.x) / words;
    word = static_cast<int32_t>(blockIdx.x) % words;
    m = block / p.key_blocks;
    c = block % p.key_blocks;
    index = block;
    key = c * static_cast<int32_t>(kGranuleKeys) + static_cast<int32_t>(threadIdx.x);
    exists = key < p.mask.seqlen_k;
    key = exists ? key : static_cast<int32_t>(p.mask.seqlen_k) - 1;
  }
  __device__ int32_t first_row() const { return word * kGranulesOfWord * static_cast<int32_t>(kGranuleRows); }
  /// Granules of the word that there are.
  __device__ int32_t granules(const Params& p) const {
    return max(min(p.row_granules - word * kGranulesOfWord, kGranulesOfWord), 0);
  }
  /// The column's rows.
  __device__ rules::ListedRows rows(const Params& p) const {
    const uint32_t ascending = p.at<uint32_t>(
        p.layout.ascending_lists)[index * kAscendingWords + key % static_cast<int32_t>(kGranuleKeys) / 32];
    return {own_columns(p.mask, own_of(p, m, p.bounds).index), lists_of(p, m), key, (ascending >> key % 32 & 1) != 0,
            first_row()};
  }
};

/// The granules of a word, two bits of it each, that the block mask leaves; hashes the blocks. By the first warp.
__device__ inline uint32_t kept_granules(const Params& p, const ListPlace& at) {
  constexpr int32_t kPerBlock = kBlockMaskSize / kGranuleRows, kBlocks = kGranulesOfWord / kPerBlock;
  static_assert(kPerBlock == 2);
  const Own own = own_of(p, at.m, p.blocks);
  const auto lane = static_cast<int32_t>(threadIdx.x);
  unsigned long long hash = 0;
  uint32_t cleared = 0;
  if (lane < kBlocks && lane * kPerBlock < at.granules(p)) {
    const int64_t block = first_block(p.mask, own.index) + int64_t{at.word * kBlocks + lane} * p.key_blocks + at.c;
    const uint8_t keep = p.mask.block_mask[block];
    if (own.first) hash = content_hash::element(content_hash::Source::kBlockMask, block, keep);
    if (!keep) cleared = 3u << lane * kPerBlock;
  }
  for (int distance = 16; distance > 0; distance /= 2) hash += __shfl_xor_sync(0xffffffff, hash, distance);
  if (lane == 0) atomicAdd(p.at<unsigned long long>(p.layout.scratch) + at.index, hash);
  return ~__reduce_or_sync(0xffffffff, cleared);
}

/// A block for every word of every key block of every mask.
__device__ __forceinline__ void classify_lists(const Params& p) {
  allow_next();
  __shared__ uint32_t some, all;
  if (threadIdx.x == 0) some = 0, all = ~0u;
  __syncthreads();
  wait_for_previous();
  const ListPlace at(p);
  rules::ListedRows rows = at.rows(p);
  const int32_t granules = at.granules(p);
  uint32_t live = 0, full = 0;
  for (int32_t g = 0; g < granules; ++g) {
    const int32_t row = at.first_row() + g * static_cast<int32_t>(kGranuleRows);
    const uint64_t seen = rows.next(row),
                   there = rules::low_bits<uint64_t>(static_cast<int32_t>(p.mask.seqlen_q) - row);
    live |= static_cast<uint32_t>(__any_sync(0xffffffff, at.exists && seen != 0)) << g;
    full |= static_cast<uint32_t>(__all_sync(0xffffffff, !at.exists || seen == there)) << g;
  }
  if (threadIdx.x % 32 == 0) {
    atomicOr(&some, live);
    atomicAnd(&all, full);
  }
  __syncthreads();
  if (threadIdx.x >= 32) return;
  const uint32_t kept = p.mask.block_mask ? kept_granules(p, at) : ~0u;
  if (threadIdx.x != 0) return;
  const int64_t word = at.index * p.layout.words_per_key * 2 + at.word;
  p.at<uint32_t>(p.layout.key_live)[word] = some & kept;
  p.at<uint32_t>(p.layout.key_full)[word] = all & kept & rules::low_bits<uint32_t>(granules);
  atomicAdd(p.at<int32_t>(p.layout.key_counts) + at.index, __popc(some & kept));
}

}  // namespace flashmask::cuda::plan
