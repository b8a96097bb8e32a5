// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/cache/tile_slots.cuh"
#include "backends/cuda/device/launch_overlap.cuh"

namespace flashmask::cuda {

inline constexpr int kDivideThreads = 1024;

/// Sums of a block of threads: of each thread's predecessors, and of all.
struct Sums {
  int64_t tiles, blocks;
};

/// One CTA that lists the row tiles with rows, adds up their live blocks, and says where the shares begin.
class WorkDivider {
 public:
  /// The numbers of the first requests and tiles are searched here, the rest in global memory.
  struct Shared {
    static constexpr int kRequests = 4096, kTiles = 3072;
    int32_t rows_begin[kRequests];
    int64_t blocks_before[kTiles];
    Sums of_warp[kDivideThreads / 32];
  };

  __device__ __forceinline__ WorkDivider(const WorkPlan& plan, const CachedView& call, Shared& shared)
      : plan_(plan), call_(call), slots_{plan, call}, shared_(shared) {}

  __device__ __forceinline__ void run() {
    load_requests();
    const Sums all = list_tiles();
    write_shares(all);
  }

 private:
  __device__ __forceinline__ void load_requests() {
    if (!call_.is_packed) return;
    for (int64_t b = threadIdx.x; b < min(call_.batch, int64_t{Shared::kRequests}); b += kDivideThreads)
      shared_.rows_begin[b] = static_cast<int32_t>(clamped_begin(b));
    __syncthreads();
  }
  __device__ __forceinline__ int64_t clamped_begin(int64_t b) const {
    return min(max(int64_t{call_.cu_seqlens_q.at(b)}, int64_t{0}), call_.rows);
  }
  __device__ __forceinline__ int64_t rows_begin(int64_t b) const {
    return b < Shared::kRequests ? shared_.rows_begin[b] : clamped_begin(b);
  }

  /// The request that a slot is of, if it is any's.
  __device__ __forceinline__ int64_t request_of(int64_t slot) const {
    if (!call_.is_packed) return quotient(slot, max(slots_.count(call_.rows), int64_t{1}));
    int64_t low = 0, high = call_.batch;  // the last one whose first slot is not after this one
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (slots_.first(middle, rows_begin(middle)) <= slot ? low : high) = middle;
    }
    return low;
  }

  /// The slot's tile, and the live blocks of its units; none if no rows are there.
  __device__ __forceinline__ int64_t make_tile(int64_t slot, RowTile& tile) const {
    const int64_t b = request_of(slot);
    if (b >= call_.batch) return 0;
    const SequenceView sequence(call_, b);
    const SequenceSizes& sizes = sequence.sizes();
    const int64_t t = slot - slots_.first(b, sizes.rows.begin);
    if (t < 0 || t >= slots_.count(sizes.rows.count)) return 0;
    tile.request = static_cast<int32_t>(b);
    tile.rows_begin = static_cast<int32_t>(sizes.rows.begin);
    tile.rows_count = static_cast<int32_t>(sizes.rows.count);
    tile.first_entry = static_cast<int32_t>(sizes.first_entry);
    tile.keys = static_cast<int32_t>(sizes.keys);
    tile.tail = static_cast<int32_t>(sizes.tail);
    slots_.place(t, sizes.rows.count, tile);
    tile.list = static_cast<int32_t>(slot * plan_.mask_heads);
    return plan_.has_classes ? count_classes(tile) : count_band(sequence, tile);
  }
  /// A unit without a live block has one all the same: its rows have to be written.
  __device__ __forceinline__ int64_t count_band(const SequenceView& sequence, RowTile& tile) const {
    const auto [begin, end] = sequence.reach(sequence.first_row() + tile.first_row, tile.row_count);
    tile.first_block = static_cast<int32_t>(begin / kBlockKeys);
    tile.live_blocks = static_cast<int32_t>(
        max(begin < end ? (end + kBlockKeys - 1) / kBlockKeys - begin / kBlockKeys : int64_t{0}, int64_t{1}));
    return int64_t{tile.live_blocks} * plan_.heads_kv;
  }
  __device__ __forceinline__ int64_t count_classes(RowTile& tile) const {
    const int32_t blocks = (tile.keys + kBlockKeys - 1) / kBlockKeys, known = min(blocks, plan_.words * kBlocksOfWord);
    int64_t all = 0;
    for (int32_t head = 0; head < plan_.mask_heads; ++head) {
      const uint32_t* const bits = plan_.live_bits + int64_t{tile.list + head} * plan_.words;
      int32_t live = blocks - known;  // keys that a plan has no room for are looked at one by one
      for (int32_t word = 0; word * kBlocksOfWord < known; ++word) live += __popc(__ldcg(bits + word));
      live = max(live, 1);
      if (head == 0) tile.live_blocks = live;
      plan_.live[tile.list + head] = live;
      all += live;
    }
    return plan_.mask_heads == 1 ? all * plan_.heads_kv : all;
  }

  /// Lists the tiles with rows, and returns how many there are, and live blocks.
  __device__ __forceinline__ Sums list_tiles() {
    Sums before{};
    for (int64_t first = 0; first < plan_.tile_slots; first += kDivideThreads) {
      RowTile tile{};
      const int64_t slot = first + threadIdx.x, blocks = slot < plan_.tile_slots ? make_tile(slot, tile) : 0;
      const Sums own{blocks > 0, blocks};
      Sums all;
      const Sums sums = add_up(own, all);
      if (blocks > 0) {
        const int64_t at = before.tiles + sums.tiles;
        tile.blocks_before = before.blocks + sums.blocks;
        plan_.tiles[at] = tile;
        if (at < Shared::kTiles) shared_.blocks_before[at] = tile.blocks_before;
      }
      before.tiles += all.tiles;
      before.blocks += all.blocks;
    }
    __syncthreads();
    return before;
  }
  /// The sums of the threads before, and of all threads.
  __device__ __forceinline__ Sums add_up(const Sums& own, Sums& all) {
    constexpr int kWarps = kDivideThreads / 32;
    static_assert(kWarps == 32, "a warp adds up the warps' sums");
    const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
    const Sums in_warp = with_lanes_before(own);
    __syncthreads();
    if (lane == 31) shared_.of_warp[warp] = in_warp;
    __syncthreads();
    const Sums warps = with_lanes_before(shared_.of_warp[lane]);
    all = from_lane(warps, 31);
    const Sums up_to = from_lane(warps, max(warp - 1, 0)), before = warp == 0 ? Sums{} : up_to;
    return {before.tiles + in_warp.tiles - own.tiles, before.blocks + in_warp.blocks - own.blocks};
  }
  /// The sums of the lanes up to this one.
  __device__ __forceinline__ static Sums with_lanes_before(Sums sum) {
    const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int64_t tiles = __shfl_up_sync(0xffffffff, sum.tiles, step),
                    blocks = __shfl_up_sync(0xffffffff, sum.blocks, step);
      if (lane >= step) sum.tiles += tiles, sum.blocks += blocks;
    }
    return sum;
  }
  __device__ __forceinline__ static Sums from_lane(const Sums& sum, int lane) {
    return {__shfl_sync(0xffffffff, sum.tiles, lane), __shfl_sync(0xffffffff, sum.blocks, lane)};
  }

  __device__ __forceinline__ int64_t blocks_before(int64_t tile) const {
    return tile < Shared::kTiles ? shared_.blocks_before[tile] : plan_.tiles[tile].blocks_before;
  }
  __device__ __forceinline__ void write_shares(const Sums& all) const {
    const int64_t in_parts = all.blocks / max(kMostParts * plan_.heads_kv * all.tiles, int64_t{1});
    const int64_t least = max(int64_t{plan_.least_blocks}, min(int64_t{plan_.split_blocks}, in_parts));
    const int64_t most = min(max(all.blocks / least, int64_t{all.blocks > 0}), int64_t{plan_.most_shares}),
                  shares = whole_units(most, all);
    for (int32_t n = static_cast<int32_t>(threadIdx.x); n < plan_.most_shares; n += kDivideThreads) {
      Share share{};
      if (n < shares) find_begin(n, all, shares, share);
      plan_.shares[n] = share;
      plan_.arrived[n] = 0;
    }
  }
  /// At most so many shares. Short ones are as many as lie in one unit each if all are alike and hardly fewer: a second
  /// unit takes long beside a short share.
  __device__ __forceinline__ int64_t whole_units(int64_t most, const Sums& all) const {
    constexpr int64_t kShortBlocks = 8;
    const int64_t units = all.tiles * plan_.heads_kv;
    if (units == 0 || units > most || all.blocks > kShortBlocks * most) return most;
    const int64_t whole = quotient(most, units) * units;
    return 16 * whole >= 15 * most ? whole : most;
  }
  __device__ __forceinline__ void find_begin(int64_t n, const Sums& all, int64_t shares, Share& share) const {
    const int64_t begin = first_block_of(n, all.blocks, shares);
    int64_t low = 0, high = all.tiles;  // the last tile that begins at or before the block
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (blocks_before(middle) <= begin ? low : high) = middle;
    }
    share.tile = plan_.tiles[low];
    share.tile_index = static_cast<int32_t>(low);
    share.blocks = static_cast<int32_t>(first_block_of(n + 1, all.blocks, shares) - begin);
    share.all_blocks = all.blocks;
    share.shares = static_cast<int32_t>(shares);
    int64_t rest = begin - share.tile.blocks_before;
    if (plan_.mask_heads == 1) {
      share.kv_head = static_cast<int32_t>(quotient(rest, share.tile.live_blocks));
      rest -= int64_t{share.kv_head} * share.tile.live_blocks;
    } else {
      while (rest >= plan_.live[share.tile.list + share.kv_head]) rest -= plan_.live[share.tile.list + share.kv_head++];
    }
    share.skipped = static_cast<int32_t>(rest);
  }

  const WorkPlan& plan_;
  const CachedView& call_;
  const TileSlots slots_;
  Shared& shared_;
};

__device__ inline void divide_work(const WorkPlan& plan, const CachedView& call) {
  __shared__ WorkDivider::Shared shared;
  wait_for_previous();
  allow_next();
  WorkDivider(plan, call, shared).run();
}

}  // namespace flashmask::cuda
