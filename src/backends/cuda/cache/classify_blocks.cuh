// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/cache/tile_slots.cuh"
#include "backends/cuda/device/launch_overlap.cuh"
#include "backends/cuda/device/shared_memory.cuh"

namespace flashmask::cuda {

/// A CTA has at most a half of a word's blocks, so that two fit a multiprocessor, with a warp for each.
inline constexpr int kClassifyWarps = kBlocksOfWord / 2, kClassifyCachedThreads = 32 * kClassifyWarps;
/// Bytes of its dynamic shared memory for each thread.
inline constexpr int kClassifyCachedBytes = kBlockKeys / 32 * static_cast<int>(sizeof(HiddenIntervals));

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
  /// `hidden` has place for the intervals of all threads' keys: there are not registers enough for them later on. The
  /// sequence has keys.
  __device__ __forceinline__ LaneKeys(const CachedView& call, const SequenceView& sequence, int64_t first, int64_t hk,
                                      HiddenIntervals* hidden)
      : s_(sequence), first_(static_cast<int32_t>(first + threadIdx.x % 32)), hidden_(hidden + threadIdx.x) {
    load(call, hk);
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

  /// Rows of the sequence outside of which vectors hide all of the lane's keys.
  struct RowRange {
    int32_t begin = INT32_MAX, end = 0;
    __device__ __forceinline__ void add(const RowRange& other) {
      begin = min(begin, other.begin);
      end = max(end, other.end);
    }
  };
  __device__ __forceinline__ RowRange left_by_vectors() const {
    RowRange all;
    for (int i = 0; i < kCount; ++i) {
      const HiddenIntervals& hidden = hidden_[i * blockDim.x];
      RowRange own{0, INT32_MAX};
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        if (hidden.begin[n] <= 0) own.begin = max(own.begin, hidden.end[n]);
        if (hidden.end[n] == INT32_MAX) own.end = min(own.end, hidden.begin[n]);
      }
      if (key(i) < s_.keys()) all.add(own);
    }
    return all;
  }

 private:
  /// Loads the keys' intervals, none without vectors, all under way at once; of keys past the last the last one's.
  __device__ __forceinline__ void load(const CachedView& call, int64_t hk) {
    int64_t page[kCount] = {};
    int32_t entry[kCount] = {};
    const auto there = [this](int i) { return min(key(i), s_.keys() - 1); };
    if (call.bounds.defined() && call.keys_in_pages && call.has_tables()) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        page[i] = quotient(there(i), call.page_size);
        entry[i] = s_.table_entry(page[i]);
      }
    }
    HiddenIntervals found[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) found[i] = s_.hidden(there(i), s_.place(there(i), page[i], entry[i]), hk);
#pragma unroll
    for (int i = 0; i < kCount; ++i) hidden_[i * blockDim.x] = found[i];
  }

  /// Likewise but for the block mask.
  __device__ __forceinline__ SeenKeys seen_in_band(const CachedView& call, int64_t begin, int64_t end) const {
    SeenKeys seen;
#pragma unroll 1
    for (int i = 0; i < kCount; ++i) {
      if (key(i) >= s_.keys()) {
        seen.all = false;
      } else if (s_.has_band_positions()) {
        by_position(key(i), hidden_[i * blockDim.x], begin, end, seen);
      } else {
        by_index(call, key(i), hidden_[i * blockDim.x], begin, end, seen);
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
    // Rows fit 32 bits, distances need not.
    auto first = static_cast<int32_t>(min(max(begin, key - call.diagonal_hi), end));
    const auto last = static_cast<int32_t>(max(min(end, key - call.diagonal_lo + 1), begin)),
               from = static_cast<int32_t>(begin), to = static_cast<int32_t>(end);
    const bool has_band = first == from && last == to;
    bool meets = false;
#pragma unroll
    for (int n = 0; n < 2; ++n) meets |= max(hidden.begin[n], from) < min(hidden.end[n], to);
    // Steps over the hidden rows: twice over the first interval, as the second may end in it.
#pragma unroll
    for (int n = 0; n < 3; ++n)
      if (first >= hidden.begin[n % 2] && first < hidden.end[n % 2]) first = hidden.end[n % 2];
    seen.add(first < last, has_band && !meets);
  }

  __device__ __forceinline__ int64_t key(int i) const { return first_ + 32 * i; }

  const SequenceView& s_;
  int32_t first_;
  HiddenIntervals* hidden_;
};

/// Stores a half word of a list; the last one with zeros for the half behind it, which nobody else stores.
__device__ __forceinline__ void store_half(uint32_t* list, int32_t half_word, int32_t half_words, uint32_t bits) {
  if (half_word % 2 == 0 && half_word == half_words - 1) {
    list[half_word / 2] = bits;
  } else {
    reinterpret_cast<uint16_t*>(list)[half_word] = static_cast<uint16_t>(bits);
  }
}

/// Row tiles of a request that a CTA classifies blocks for at a time.
inline constexpr int kClassifyTiles = 8;

/// Sets one of `half_words` half words of the class bits of some lists of a request: a warp for each block of 128 keys
/// that lies in the half word and in the request's room.
__device__ inline void classify_blocks(const WorkPlan& plan, const CachedView& call, int32_t half_words) {
  __shared__ uint8_t classes[2][32];
  wait_for_previous();
  allow_next();
  const uint32_t list_of_all = blockIdx.x / static_cast<uint32_t>(half_words),
                 batch = static_cast<uint32_t>(call.batch);
  const int64_t b = list_of_all % batch, first_tile = int64_t{list_of_all / batch} * kClassifyTiles,
                step = int64_t{gridDim.x / (half_words * batch)} * kClassifyTiles;
  const SequenceView sequence(call, b);
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32),
            warps = static_cast<int>(blockDim.x / 32);
  const auto half_word = static_cast<int32_t>(blockIdx.x % static_cast<uint32_t>(half_words));
  const int64_t first_block = half_word * kClassifyWarps;
  // The other half of the last word with keys is read, too.
  if (first_block / kBlocksOfWord * kBlocksOfWord * kBlockKeys >= sequence.keys()) return;
  const TileSlots slots{plan, call};
  const int64_t first_slot = slots.first(b, sequence.rows().begin), tiles = slots.count(sequence.rows().count);
  if (first_tile >= tiles) return;
  int turn = 0;
  for (int32_t head = 0; head < plan.mask_heads; ++head) {
    const LaneKeys keys(call, sequence, (first_block + warp) * kBlockKeys, head,
                        reinterpret_cast<HiddenIntervals*>(dynamic_shared_memory()));
    for (int64_t t = first_tile; t < tiles && first_slot + t < plan.tile_slots; turn ^= 1) {
      RowTile tile;
      slots.place(t, sequence.rows().count, tile);
      const int64_t row = sequence.first_row() + tile.first_row, end = row + tile.row_count;
      const SeenKeys seen = end > 0 ? keys.seen_by(call, max(row, int64_t{0}), end, head) : SeenKeys{};
      const bool live = __any_sync(0xffffffff, seen.any), full = row >= 0 && __all_sync(0xffffffff, seen.all);
      if (lane == 0) classes[turn][warp] = static_cast<uint8_t>(live | full << 1);
      __syncthreads();
      if (warp == 0) {
        const uint32_t own = lane < warps ? classes[turn][lane] : 0;
        const uint32_t live_half = __ballot_sync(0xffffffff, own & 1), full_half = __ballot_sync(0xffffffff, own & 2);
        if (lane == 0) {
          const int64_t list = (first_slot + t) * plan.mask_heads + head;
          store_half(plan.live_bits + list * plan.words, half_word, half_words, live_half);
          store_half(plan.full_bits + list * plan.words, half_word, half_words, full_half);
        }
      }
      if (++t % kClassifyTiles == 0) t += step - kClassifyTiles;
    }
  }
}

}  // namespace flashmask::cuda
