// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/cache/tile_slots.cuh"
#include "backends/cuda/device/launch_overlap.cuh"

namespace flashmask::cuda {

/// A CTA has a half of a word's blocks, so that two fit a multiprocessor.
inline constexpr int kClassifyWarps = kBlocksOfWord / 2, kClassifyCachedThreads = 32 * kClassifyWarps;

/// How much some rows see of a lane's keys of a block.
struct SeenKeys {
  bool any = false, all = true;
  __device__ __forceinline__ void add(bool is_seen, bool is_seen_by_all) {
    any |= is_seen;
    all &= is_seen_by_all;
  }
  __device__ __forceinline__ void add(const SeenKeys& other) { add(other.any, other.all); }
};

/// A lane's keys of a block of 128, with what they need to be compared with rows.
class LaneKeys {
 public:
  static constexpr int kCount = kBlockKeys / 32;
  /// Intervals of all threads: there are not registers enough for them.
  using Hidden = HiddenIntervals[kCount][kClassifyCachedThreads];

  __device__ __forceinline__ LaneKeys(const SequenceView& sequence, int64_t first, int64_t hk, Hidden& hidden)
      : s_(sequence), first_(static_cast<int32_t>(first + threadIdx.x % 32)), hidden_(hidden) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (key(i) < s_.keys()) hidden_[i][threadIdx.x] = s_.hidden(key(i), s_.place(key(i)), hk);
  }

  /// How much of the keys the sequence's rows [begin, end) see under a key head, begin at least 0: exact but in the
  /// tail, whose keys may be seen.
  __device__ __forceinline__ SeenKeys seen_by(const CachedView& call, int64_t begin, int64_t end, int64_t hk) const {
    SeenKeys seen;
#pragma unroll 1
    for (int64_t next; begin < end; begin = next) {
      next = call.block_mask.defined() ? min(end, (begin / kBlockKeys + 1) * kBlockKeys) : end;
      seen.add(s_.in_blocks(begin, first_, hk) ? seen_in_band(call, begin, next) : SeenKeys{false, false});
    }
    return seen;
  }

 private:
  /// Likewise but for the block mask.
  __device__ __forceinline__ SeenKeys seen_in_band(const CachedView& call, int64_t begin, int64_t end) const {
    SeenKeys seen;
#pragma unroll 1
    for (int i = 0; i < kCount; ++i) {
      if (key(i) >= s_.keys()) {
        seen.all = false;
      } else if (s_.has_positions()) {
        by_position(key(i), hidden_[i][threadIdx.x], begin, end, seen);
      } else {
        by_index(call, key(i), hidden_[i][threadIdx.x], begin, end, seen);
      }
    }
    return seen;
  }
  __device__ __forceinline__ void by_position(int64_t key, const HiddenIntervals& hidden, int64_t begin, int64_t end,
                                              SeenKeys& seen) const {
    const int64_t position = s_.key_position(key, s_.place(key));
    for (int64_t r = begin; r < end; ++r) {
      const bool sees = s_.in_band(r, key, s_.row_position(r), position) && !hidden.hides(r);
      seen.add(sees, sees);
    }
  }
  __device__ __forceinline__ void by_index(const CachedView& call, int64_t key, const HiddenIntervals& hidden,
                                           int64_t begin, int64_t end, SeenKeys& seen) const {
    if (key >= s_.tail_begin() && end > s_.tail_begin()) return seen.add(true, false);
    int64_t first = max(begin, key - call.diagonal_hi);
    const int64_t last = min(end, key - call.diagonal_lo + 1);
    const bool has_band = first == begin && last == end;
    bool meets = false;
#pragma unroll
    for (int n = 0; n < 2; ++n) meets |= max(int64_t{hidden.begin[n]}, begin) < min(int64_t{hidden.end[n]}, end);
    // Steps over the hidden rows: twice over the first interval, as the second may end in it.
#pragma unroll
    for (int n = 0; n < 3; ++n)
      if (first >= hidden.begin[n % 2] && first < hidden.end[n % 2]) first = hidden.end[n % 2];
    seen.add(first < last, has_band && !meets);
  }

  __device__ __forceinline__ int64_t key(int i) const { return first_ + 32 * i; }

  const SequenceView& s_;
  int32_t first_;
  Hidden& hidden_;
};

/// Sets one of `half_words` half words of the class bits of all lists of a request: a warp for each block of 128 keys.
__device__ inline void classify_blocks(const WorkPlan& plan, const CachedView& call, int32_t half_words) {
  __shared__ uint8_t classes[2][32];
  __shared__ LaneKeys::Hidden hidden;
  wait_for_previous();
  allow_next();
  const int64_t b = blockIdx.x / half_words;
  const SequenceView sequence(call, b);
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  const int64_t half_word = blockIdx.x % half_words, first_block = half_word * kClassifyWarps;
  // The other half of the last word with keys is read, too.
  if (first_block / kBlocksOfWord * kBlocksOfWord * kBlockKeys >= sequence.keys()) return;
  const TileSlots slots{plan, call};
  const int64_t first_slot = slots.first(b, sequence.rows().begin), tiles = slots.count(sequence.rows().count);
  int turn = 0;
  for (int32_t head = 0; head < plan.mask_heads; ++head) {
    const LaneKeys keys(sequence, (first_block + warp) * kBlockKeys, head, hidden);
    for (int64_t t = 0; t < tiles && first_slot + t < plan.tile_slots; ++t, turn ^= 1) {
      RowTile tile;
      slots.place(t, sequence.rows().count, tile);
      const int64_t row = sequence.first_row() + tile.first_row, end = row + tile.row_count;
      const SeenKeys seen = end > 0 ? keys.seen_by(call, max(row, int64_t{0}), end, head) : SeenKeys{};
      const bool live = __any_sync(0xffffffff, seen.any), full = row >= 0 && __all_sync(0xffffffff, seen.all);
      if (lane == 0) classes[turn][warp] = static_cast<uint8_t>(live | full << 1);
      __syncthreads();
      if (warp == 0) {
        const uint32_t own = lane < kClassifyWarps ? classes[turn][lane] : 0;
        const auto live_half = static_cast<uint16_t>(__ballot_sync(0xffffffff, own & 1)),
                   full_half = static_cast<uint16_t>(__ballot_sync(0xffffffff, own & 2));
        const int64_t at = 2 * ((first_slot + t) * plan.mask_heads + head) * plan.words + half_word;
        if (lane == 0) {
          reinterpret_cast<uint16_t*>(plan.live_bits)[at] = live_half;
          reinterpret_cast<uint16_t*>(plan.full_bits)[at] = full_half;
        }
      }
    }
  }
}

}  // namespace flashmask::cuda
