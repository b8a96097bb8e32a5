// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/cache/classify_blocks.cuh"

namespace flashmask::cuda {

/// The most middle tiles of a tall tile: whole small tiles fill more than half of one. Small tiles are bits of a word.
inline constexpr int kMostMiddleTiles = 2 * kTallPackedRows / kMiddlePackedRows;
static_assert(kMiddlePackedRows <= 32);

/// Costs of a block of keys, in about half a microsecond, where rows of one tile read it. Its mask takes one warp the
/// longer, the more rows there are; a small tile of one request seldom needs one.
inline constexpr int kSmallCost = 2, kMiddleCost = 2, kMaskedMiddleCost = 3, kTallCost = 3, kMaskedTallCost = 8;

/// Row tiles that see a block of keys, and those of them that see all of it, each a bit.
struct TileBits {
  uint32_t live, full;
  __device__ __forceinline__ void add(int n, bool is_live, bool is_full) {
    live |= uint32_t{is_live} << n;
    full |= uint32_t{is_full} << n;
  }
  __device__ __forceinline__ bool any() const { return live != 0; }
  /// True if all of `count` tiles are full.
  __device__ __forceinline__ bool all(int count) const { return full == rules::low_bits<uint32_t>(count); }
};

/// The tiles of a tall tile that a block of keys is live in: each row that sees it is in one of them.
struct LevelBits {
  TileBits tall, middle, small[kMostMiddleTiles];

  /// Gives the block to the sizes that cost least. `small` has all tiles that see it, of which there are small_count in
  /// each middle tile and fewer in the last: last_count of `count`.
  __device__ __forceinline__ void choose(int count, int small_count, int last_count) {
    int cost = 0;
    bool any = false, all = true;
    for (int m = 0; m < count; ++m) {
      const int tiles = m + 1 < count ? small_count : last_count;
      const bool is_full = small[m].all(tiles);
      const int alone = kSmallCost * __popc(small[m].live), together = is_full ? kMiddleCost : kMaskedMiddleCost;
      any |= small[m].any();
      all &= is_full;
      cost += min(alone, together);
      if (alone <= together) continue;
      middle.add(m, true, is_full);
    }
    if (any && (all ? kTallCost : kMaskedTallCost) < cost) {
      tall.add(0, true, all);
      middle = {};
      for (int m = 0; m < count; ++m) small[m] = {};
    }
    for (int m = 0; m < count; ++m)
      if (middle.live >> m & 1) small[m] = {};
  }
};

/// Sets one of `half_words` half words of the class bits of a tall tile of a forest and of all tiles in it: a warp for
/// each block of keys, as in classify_blocks().
class LevelClassifier {
 public:
  __device__ __forceinline__ LevelClassifier(const WorkPlan& plan, const CachedView& call, int32_t half_words)
      : plan_(plan),
        call_(call),
        half_words_(half_words),
        half_word_(static_cast<int32_t>(blockIdx.x) % half_words),
        tall_(static_cast<int32_t>(blockIdx.x) / half_words),
        middle_of_tall_(plan.levels[0].rows / plan.levels[1].rows),
        small_of_middle_(plan.levels[1].rows / plan.levels[2].rows) {}

  __device__ __forceinline__ void run(LevelBits (&found)[kClassifyWarps]) const {
    const SequenceView sequence(call_, 0);
    const int64_t first_block = int64_t{half_word_} * kClassifyWarps;
    // The other half of the last word with keys is read, too.
    if (first_block / kBlocksOfWord * kBlocksOfWord * kBlockKeys >= sequence.keys()) return;
    const int64_t rows =
        min(sequence.rows().count - int64_t{tall_} * plan_.levels[0].rows, int64_t{plan_.levels[0].rows});
    if (rows <= 0) return;
    const auto warp = static_cast<int>(threadIdx.x / 32);
    for (int32_t head = 0; head < plan_.mask_heads; ++head) {
      const LaneKeys keys(call_, sequence, (first_block + warp) * kBlockKeys, head,
                          reinterpret_cast<HiddenIntervals*>(dynamic_shared_memory()));
      classify(sequence, keys, static_cast<int32_t>(rows), head, found[warp]);
      __syncthreads();
      store(found, static_cast<int32_t>(rows), head);
      __syncthreads();
    }
  }

 private:
  __device__ __forceinline__ static int32_t tiles_of(int32_t rows, const TileLevel& level) {
    return (rows + level.rows - 1) / level.rows;
  }

  /// Finds the tiles of the tall tile's rows that the warp's block is live in.
  __device__ __forceinline__ void classify(const SequenceView& sequence, const LaneKeys& keys, int32_t rows,
                                           int32_t head, LevelBits& found) const {
    const int64_t first_row = sequence.first_row() + int64_t{tall_} * plan_.levels[0].rows;
    const LaneKeys::RowRange range = over_lanes(keys.left_by_vectors());
    const auto from = static_cast<int32_t>(min(max(range.begin - first_row, int64_t{0}), int64_t{rows})),
               to = static_cast<int32_t>(min(max(range.end - first_row, int64_t{0}), int64_t{rows}));
    const int32_t small = tiles_of(rows, plan_.levels[2]), middle = tiles_of(rows, plan_.levels[1]);
    const bool is_leader = threadIdx.x % 32 == 0;
    if (is_leader) found = {};
    for (int32_t n = from / plan_.levels[2].rows; n < tiles_of(to, plan_.levels[2]); ++n) {
      const int64_t row = first_row + int64_t{n} * plan_.levels[2].rows,
                    end = min(row + plan_.levels[2].rows, first_row + rows);
      const SeenKeys seen = end > 0 ? keys.seen_by(call_, max(row, int64_t{0}), end, head) : SeenKeys{};
      const bool any = __any_sync(0xffffffff, seen.any), all = __all_sync(0xffffffff, seen.all);
      if (is_leader) found.small[n / small_of_middle_].add(n % small_of_middle_, any, row >= 0 && all);
    }
    if (is_leader) found.choose(middle, small_of_middle_, small - (middle - 1) * small_of_middle_);
  }
  __device__ __forceinline__ static LaneKeys::RowRange over_lanes(LaneKeys::RowRange range) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
      range.add({__shfl_xor_sync(0xffffffff, range.begin, step), __shfl_xor_sync(0xffffffff, range.end, step)});
    return range;
  }

  /// Stores the half words of all tiles, a tile a thread.
  __device__ __forceinline__ void store(const LevelBits (&found)[kClassifyWarps], int32_t rows, int32_t head) const {
    const int32_t warps = static_cast<int32_t>(blockDim.x / 32), small = tiles_of(rows, plan_.levels[2]),
                  middle = tiles_of(rows, plan_.levels[1]);
    for (auto n = static_cast<int32_t>(threadIdx.x); n < small + middle + 1; n += static_cast<int32_t>(blockDim.x)) {
      uint32_t live = 0, full = 0;
      for (int32_t w = 0; w < warps; ++w) {
        const auto [bits, at] = n < small            ? Place{found[w].small[n / small_of_middle_], n % small_of_middle_}
                                : n < small + middle ? Place{found[w].middle, n - small}
                                                     : Place{found[w].tall, 0};
        live |= (bits.live >> at & 1) << w;
        full |= (bits.full >> at & 1) << w;
      }
      const int32_t slot = n < small ? plan_.levels[2].first_slot + tall_ * middle_of_tall_ * small_of_middle_ + n
                           : n < small + middle ? plan_.levels[1].first_slot + tall_ * middle_of_tall_ + n - small
                                                : tall_;
      const int64_t list = (int64_t{slot} * plan_.mask_heads + head) * plan_.words;
      store_half(plan_.live_bits + list, half_word_, half_words_, live);
      store_half(plan_.full_bits + list, half_word_, half_words_, full);
    }
  }
  struct Place {
    TileBits bits;
    int32_t at;
  };

  const WorkPlan& plan_;
  const CachedView& call_;
  const int32_t half_words_, half_word_, tall_, middle_of_tall_, small_of_middle_;
};

__device__ inline void classify_levels(const WorkPlan& plan, const CachedView& call, int32_t half_words) {
  __shared__ LevelBits found[kClassifyWarps];
  wait_for_previous();
  allow_next();
  LevelClassifier(plan, call, half_words).run(found);
}

}  // namespace flashmask::cuda
