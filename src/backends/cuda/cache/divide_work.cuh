// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/cache/tile_slots.cuh"
#include "backends/cuda/device/launch_overlap.cuh"

namespace flashmask::cuda {

inline constexpr int kDivideThreads = 1024;

/// Sums of a block of threads: of each thread's predecessors, and of all. With batch_invariant a tile counts once for
/// each of its splits.
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
    int32_t most_dealt;  ///< blocks of a CTA, where units are dealt whole
  };

  __device__ __forceinline__ WorkDivider(const WorkPlan& plan, const CachedView& call, Shared& shared)
      : plan_(plan), call_(call), slots_{plan, call}, shared_(shared) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) shared_.most_dealt = 0;
    load_requests();
    const Sums all = list_tiles();
    write_shares(all);
  }

 private:
  static constexpr int64_t kDealtMore = 6;  ///< a CTA may have one in so many beyond its share, in whole units

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

  /// The slot's tile, and the live blocks of its units; none if no rows are there, or in a forest no live blocks.
  __device__ __forceinline__ Sums make_tile(int64_t slot, RowTile& tile) const {
    if (plan_.is_forest()) return make_level_tile(static_cast<int32_t>(slot), tile);
    const int64_t b = request_of(slot);
    if (b >= call_.batch) return {};
    const SequenceView sequence(call_, b);
    const SequenceSizes& sizes = sequence.sizes();
    const int64_t t = slot - slots_.first(b, sizes.rows.begin);
    if (t < 0 || t >= slots_.count(sizes.rows.count)) return {};
    set_sizes(b, sizes, tile);
    slots_.place(t, sizes.rows.count, tile);
    tile.list = tile.live_list = static_cast<int32_t>(slot * plan_.mask_heads);
    if (!lists_splits()) return {1, plan_.has_classes ? count_classes(tile) : count_band(sequence, tile)};
    if (!plan_.has_classes) count_band(sequence, tile);
    return count_splits(tile);
  }
  __device__ __forceinline__ static void set_sizes(int64_t b, const SequenceSizes& sizes, RowTile& tile) {
    tile.request = static_cast<int32_t>(b);
    tile.rows_begin = static_cast<int32_t>(sizes.rows.begin);
    tile.rows_count = static_cast<int32_t>(sizes.rows.count);
    tile.first_entry = static_cast<int32_t>(sizes.first_entry);
    tile.keys = static_cast<int32_t>(sizes.keys);
    tile.tail = static_cast<int32_t>(sizes.tail);
  }
  __device__ __forceinline__ Sums make_level_tile(int32_t slot, RowTile& tile) const {
    const SequenceView sequence(call_, 0);
    const TileLevel& level = slots_.place_in_level(slot, sequence.rows().count, tile);
    if (tile.row_count <= 0) return {};
    set_sizes(0, sequence.sizes(), tile);
    tile.list = tile.live_list = slot * plan_.mask_heads;
    tile.part = level.first_result + (slot - level.first_slot) * plan_.heads_kv * level.packed_rows;
    tile.parts = level.packed_rows;
    const int64_t blocks = count_classes(tile);
    return {blocks > 0, blocks};
  }
  __device__ __forceinline__ bool has_whole_units() const { return plan_.invariant_blocks > 0; }
  __device__ __forceinline__ bool lists_splits() const { return has_whole_units() && !plan_.folds(); }
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
    int32_t first_word = plan_.words;
    for (int32_t head = 0; head < plan_.mask_heads; ++head) {
      const uint32_t* const bits = plan_.live_bits + int64_t{tile.list + head} * plan_.words;
      int32_t live = blocks - known;  // keys that a plan has no room for are looked at one by one
      for (int32_t word = 0; word * kBlocksOfWord < known; ++word) {
        const uint32_t of_word = __ldcg(bits + word);
        live += __popc(of_word);
        if (of_word != 0) first_word = min(first_word, word);
      }
      live = max(live, 1);
      if (head == 0) tile.live_blocks = live;
      plan_.live[tile.list + head] = live;
      all += live;
    }
    if (plan_.is_forest()) {
      if (first_word == plan_.words) return 0;
      tile.first_block = first_word * kBlocksOfWord;  // many words lie before a request's own keys
    }
    return plan_.mask_heads == 1 ? all * plan_.heads_kv : all;
  }

  // --- Splits, with batch_invariant ------------------------------------------------------------------

  /// Calls f(split, end, blocks) for each split in which a tile's units have live blocks, or for one if they have none:
  /// the tile as it is listed for it, the split's last block + 1, and the units' blocks.
  template <typename F>
  __device__ __forceinline__ void for_each_split(const RowTile& tile, const F& f) const {
    const int32_t all = (tile.keys + kBlockKeys - 1) / kBlockKeys,
                  begin = plan_.has_classes ? 0 : min(tile.first_block, max(all - 1, 0)),
                  end = plan_.has_classes ? all : min(tile.first_block + tile.live_blocks, all);
    RowTile split = tile;
    split.part = 0;
    int32_t next;
    for (int32_t first = min(begin / plan_.invariant_blocks * plan_.invariant_blocks, plan_.last_split); first < end;
         first = next) {
      next = plan_.split_end(first, all);
      const int32_t last = min(next, end);
      split.first_block = max(first, begin);
      split.live_blocks = live_in(split, last, 0);
      const int64_t blocks = blocks_in(split, last);
      if (blocks == 0) continue;
      f(split, last, blocks);
      ++split.part;
    }
    if (split.part > 0) return;
    split.first_block = 0;
    split.live_blocks = 1;
    f(split, 0, int64_t{plan_.heads_kv});
  }
  /// Live blocks of a tile's split under a head, of those before `end`.
  __device__ __forceinline__ int32_t live_in(const RowTile& split, int32_t end, int32_t head) const {
    if (!plan_.has_classes) return end - split.first_block;
    const int32_t known = min(end, plan_.words * kBlocksOfWord);
    const uint32_t* const bits = plan_.live_bits + int64_t{split.list + head} * plan_.words;
    int32_t live = end - max(known, split.first_block);  // keys that a plan has no room for are looked at one by one
    for (int32_t word = split.first_block / kBlocksOfWord; word * kBlocksOfWord < known; ++word) {
      const int32_t before = word * kBlocksOfWord;
      live += __popc(__ldcg(bits + word) & blocks_between(split.first_block - before, known - before));
    }
    return live;
  }
  /// Live blocks of the split's units; where one has some, each has one at least.
  __device__ __forceinline__ int64_t blocks_in(const RowTile& split, int32_t end) const {
    if (plan_.mask_heads == 1) return int64_t{split.live_blocks} * plan_.heads_kv;
    int64_t all = 0;
    bool any = false;
    for (int32_t head = 0; head < plan_.mask_heads; ++head) {
      const int32_t live = live_in(split, end, head);
      any |= live > 0;
      all += max(live, 1);
    }
    return any ? all : 0;
  }
  __device__ __forceinline__ Sums count_splits(const RowTile& tile) const {
    Sums own{};
    for_each_split(tile, [&own](const RowTile&, int32_t, int64_t blocks) {
      ++own.tiles;
      own.blocks += blocks;
    });
    return own;
  }
  /// Lists a tile for its splits, of which there are `own`, from place `before` on. A sequence of one split has final
  /// results, whatever the mask.
  __device__ __forceinline__ void list_splits(const RowTile& tile, const Sums& own, Sums before) const {
    const bool is_final = (tile.keys + kBlockKeys - 1) / kBlockKeys <= plan_.invariant_blocks;
    for_each_split(tile, [&](RowTile split, int32_t end, int64_t blocks) {
      split.parts = is_final ? 0 : static_cast<int32_t>(own.tiles);
      split.live_list = static_cast<int32_t>(before.tiles * plan_.mask_heads);
      for (int32_t head = 0; plan_.mask_heads > 1 && head < plan_.mask_heads; ++head)
        plan_.live[split.live_list + head] = max(live_in(split, end, head), 1);
      for (int32_t head = 0; split.part == 0 && head < plan_.heads_kv; ++head)
        plan_.arrived[split.list / plan_.mask_heads * plan_.heads_kv + head] = 0;
      list(split, before);
      ++before.tiles;
      before.blocks += blocks;
    });
  }

  /// Puts a tile into the list, where `before` lies before it.
  __device__ __forceinline__ void list(RowTile tile, const Sums& before) const {
    tile.blocks_before = before.blocks;
    plan_.tiles[before.tiles] = tile;
    if (before.tiles < Shared::kTiles) shared_.blocks_before[before.tiles] = tile.blocks_before;
  }

  /// Lists the tiles with rows, and returns how many there are, and live blocks.
  __device__ __forceinline__ Sums list_tiles() {
    Sums before{};
    for (int64_t first = 0; first < plan_.tile_slots; first += kDivideThreads) {
      RowTile tile{};
      const int64_t slot = first + threadIdx.x;
      const Sums own = slot < plan_.tile_slots ? make_tile(slot, tile) : Sums{};
      Sums all;
      const Sums sums = add_up(own, all);
      for (int32_t head = 0; plan_.is_forest() && slot < plan_.tile_slots && head < plan_.heads_kv; ++head)
        plan_.results[slot * plan_.heads_kv + head] = {};
      if (own.tiles > 0) {
        const Sums place{before.tiles + sums.tiles, before.blocks + sums.blocks};
        if (lists_splits()) {
          list_splits(tile, own, place);
        } else {
          list(tile, place);
        }
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
  __device__ __forceinline__ void write_shares(const Sums& all) {
    const int64_t in_parts = all.blocks / max(kMostParts * plan_.heads_kv * all.tiles, int64_t{1});
    const int64_t least = max(int64_t{plan_.least_blocks}, min(int64_t{plan_.split_blocks}, in_parts));
    const int64_t most = min(max(all.blocks / least, int64_t{all.blocks > 0}), int64_t{plan_.most_shares}),
                  shares = whole_units(most, all);
    const bool deals = deals_units(all);
    for (int32_t n = static_cast<int32_t>(threadIdx.x); n < plan_.most_shares; n += kDivideThreads) {
      Share share{};
      share.dealt = deals ? static_cast<int32_t>(all.tiles) : 0;
      if (n < shares && !deals) find_share(n, all, shares, share);
      plan_.shares[n] = share;
      if (!has_whole_units()) plan_.arrived[n] = 0;
    }
    if (plan_.is_forest()) write_results(all, shares);
  }
  /// Says where the results of a forest's units lie.
  __device__ __forceinline__ void write_results(const Sums& all, int64_t shares) const {
    const auto units = static_cast<int32_t>(all.tiles) * plan_.heads_kv;
    for (auto n = static_cast<int32_t>(threadIdx.x); n < units; n += kDivideThreads) {
      const RowTile& tile = plan_.tiles[n / plan_.heads_kv];
      const int32_t head = n % plan_.heads_kv;
      int64_t before = tile.blocks_before + (plan_.mask_heads == 1 ? int64_t{head} * tile.live_blocks : 0);
      int32_t live = tile.live_blocks;
      for (int32_t h = 0; plan_.mask_heads > 1 && h <= head; ++h) {
        live = plan_.live[tile.live_list + h];
        if (h < head) before += live;
      }
      const auto first = static_cast<int32_t>(share_of(before, all.blocks, shares)),
                 last = static_cast<int32_t>(share_of(before + live - 1, all.blocks, shares));
      plan_.results[tile.list / plan_.mask_heads * plan_.heads_kv + head] = {result_row(tile, head, first),
                                                                             last - first + 1};
    }
  }
  __device__ __forceinline__ bool is_tall() const { return plan_.packed_rows > kPackedRows; }
  /// True if no CTA has much more than its share where whole units are dealt.
  __device__ __forceinline__ bool deals_units(const Sums& all) {
    if (plan_.is_forest()) return false;
    if (!is_tall() || plan_.folds()) return is_tall();
    const auto ctas = static_cast<int32_t>(plan_.most_shares), tiles = static_cast<int32_t>(all.tiles);
    for (auto own = static_cast<int32_t>(threadIdx.x); own < ctas; own += kDivideThreads) {
      int32_t blocks = 0;
#pragma unroll 4
      for (DealtUnits dealt(tiles * plan_.heads_kv, ctas, own); dealt.is_left(); dealt.advance())
        if (dealt.has_unit()) blocks += unit_blocks(tiles, dealt.unit());
      atomicMax(&shared_.most_dealt, blocks);
    }
    __syncthreads();
    const int64_t share = all.blocks / ctas;
    return shared_.most_dealt <= share + share / kDealtMore;
  }
  __device__ __forceinline__ int32_t unit_blocks(int32_t tiles, int32_t n) const {
    const RowTile& tile = plan_.tiles[dealt_tile(tiles, n, plan_.heads_kv)];
    return plan_.mask_heads == 1 ? tile.live_blocks : plan_.live[tile.live_list + n % plan_.heads_kv];
  }

  /// At most so many shares. Short ones are as many as lie in one unit each if all are alike and hardly fewer: a second
  /// unit takes long beside a short share.
  __device__ __forceinline__ int64_t whole_units(int64_t most, const Sums& all) const {
    constexpr int64_t kShortBlocks = 8;
    const int64_t units = all.tiles * plan_.heads_kv;
    if (has_whole_units() || plan_.is_forest()) return most;
    if (units == 0 || units > most || all.blocks > kShortBlocks * most) return most;
    const int64_t whole = quotient(most, units) * units;
    return 16 * whole >= 15 * most ? whole : most;
  }
  /// The beginning of a share: after the skipped live blocks of a unit. Its block is all.blocks if no unit is left.
  struct Begin {
    int64_t block, tile = 0;
    int32_t kv_head = 0, skipped = 0;
  };
  __device__ __forceinline__ Begin find_begin(int64_t n, const Sums& all, int64_t shares) const {
    Begin begin{first_block_of(n, all.blocks, shares)};
    if (begin.block == all.blocks) return begin;
    int64_t high = all.tiles;  // the last tile that begins at or before the block
    while (high - begin.tile > 1) {
      const int64_t middle = (begin.tile + high) / 2;
      (blocks_before(middle) <= begin.block ? begin.tile : high) = middle;
    }
    const RowTile& tile = plan_.tiles[begin.tile];
    int64_t rest = begin.block - tile.blocks_before;
    int32_t live = tile.live_blocks;
    if (plan_.mask_heads == 1) {
      begin.kv_head = static_cast<int32_t>(quotient(rest, live));
      rest -= int64_t{begin.kv_head} * live;
    } else {
      while (rest >= (live = plan_.live[tile.live_list + begin.kv_head])) rest -= live, ++begin.kv_head;
    }
    if (!has_whole_units() || rest == 0) {
      begin.skipped = static_cast<int32_t>(rest);
    } else {  // the unit is the share's before
      begin.block += live - rest;
      if (++begin.kv_head == plan_.heads_kv) begin.kv_head = 0, ++begin.tile;
    }
    return begin;
  }
  __device__ __forceinline__ void find_share(int64_t n, const Sums& all, int64_t shares, Share& share) const {
    const Begin begin = find_begin(n, all, shares);
    const int64_t end =
        has_whole_units() ? find_begin(n + 1, all, shares).block : first_block_of(n + 1, all.blocks, shares);
    share.all_blocks = all.blocks;
    share.shares = static_cast<int32_t>(shares);
    share.blocks = static_cast<int32_t>(end - begin.block);
    if (share.blocks == 0) return;
    share.tile = plan_.tiles[begin.tile];
    share.tile_index = static_cast<int32_t>(begin.tile);
    share.kv_head = begin.kv_head;
    share.skipped = begin.skipped;
    if (plan_.is_forest()) pass_words(share);
  }
  /// Finds the word of a share's first block, so that no CTA looks for it: each word waits for memory.
  __device__ __forceinline__ void pass_words(Share& share) const {
    const int32_t list = share.tile.list + (plan_.mask_heads == 1 ? 0 : share.kv_head);
    const uint32_t* const bits = plan_.live_bits + int64_t{list} * plan_.words;
    share.first_word = share.tile.first_block / kBlocksOfWord;
    for (int32_t live; share.first_word < plan_.words; ++share.first_word, share.passed += live) {
      live = __popc(__ldcg(bits + share.first_word));
      if (share.passed + live > share.skipped) return;
    }
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
