// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/ptx/tma_stream.cuh"
#include "backends/cuda/sm90/decode/traits.cuh"

namespace flashmask::sm90 {

/// The tensor that a producer warp copies. The warp of keys also announces units and tiles to the other roles.
enum class Copied { kKeys, kValues };

/// A producer warp: walks the CTA's shares and loads K, or V. All 32 lanes run it; each issues the copies of its boxes.
template <typename Traits, Copied kCopied>
class DecodeProducer {
 public:
  using Shared = DecodeShared<Traits>;
  __device__ __forceinline__ DecodeProducer(const DecodeParams& p, Shared& shared)
      : p_(p), shared_(shared), masks_all_(needs_positions(p)) {}

  __device__ __forceinline__ void run() {
    for (int32_t n = static_cast<int32_t>(blockIdx.x); n < p_.plan.most_shares; n += static_cast<int32_t>(gridDim.x)) {
      const cuda::Share& from = p_.plan.shares[n];
      if (from.blocks > 0) run_share(n, from);
    }
    flush();
    if constexpr (kAnnounces) announce_end();
  }

 private:
  static constexpr bool kAnnounces = kCopied == Copied::kKeys;
  static constexpr int kBlocks = kAnnounces ? Traits::kQkBlocks : Traits::kVBlocks;
  static constexpr uint32_t kPartBytes = kAnnounces ? Traits::kKeyPartBytes : Traits::kValuePartBytes;
  static constexpr int kLaneBoxes = 4;  ///< boxes of a lane, if each has one key

  __device__ __forceinline__ void run_share(int32_t n, const cuda::Share& share) {
    cuda::RowTile tile = share.tile;
    int32_t tile_index = share.tile_index, head = share.kv_head, skipped = share.skipped, left = share.blocks;
    const int64_t all = share.all_blocks, shares = share.shares;
    // Blocks of the units before this one.
    int64_t before = tile.blocks_before;
    if (p_.plan.mask_heads == 1) {
      before += int64_t{head} * tile.live_blocks;
    } else {
      for (int32_t h = 0; h < head; ++h) before += p_.plan.live[tile.list + h];
    }
    while (true) {
      const int32_t live = p_.plan.mask_heads == 1 ? tile.live_blocks : p_.plan.live[tile.list + head];
      const int32_t blocks = min(live - skipped, left);
      if constexpr (kAnnounces) {
        const auto first_share = static_cast<int32_t>(cuda::share_of(before, all, shares)),
                   last_share = static_cast<int32_t>(cuda::share_of(before + live - 1, all, shares));
        announce_work(
            {blocks, head, inside(tile), first_share, last_share, n == first_share ? p_.plan.most_shares + n : n, 0});
      }
      run_unit(tile, head, skipped, blocks);
      left -= blocks;
      if (left == 0) return;
      before += live;
      skipped = 0;
      if (++head == p_.plan.heads_kv) {
        head = 0;
        tile = p_.plan.tiles[++tile_index];
      }
    }
  }

  /// The tile without rows that the call's tensors do not have: a plan may be stale, or know more rows than the call.
  __device__ __forceinline__ cuda::RowTile inside(cuda::RowTile tile) const {
    const int64_t rows = p_.call.rows - tile.rows_begin - tile.first_row;
    tile.row_count = static_cast<int32_t>(max(min(int64_t{tile.row_count}, rows), int64_t{0}));
    return tile;
  }
  __device__ __forceinline__ void announce_work(const Work& work) {
    const uint32_t at = works_.stage();
    ptx::wait(shared_.work_empty[at], works_.phase() ^ 1);
    if (ptx::is_leader()) {
      shared_.works[at] = work;
      ptx::arrive(shared_.work_full[at]);
    }
    __syncwarp();
    works_.advance();
  }
  __device__ __forceinline__ void announce_end() {
    Work end{};
    end.tiles = Work::kEnd;
    announce_work(end);
  }
  __device__ __forceinline__ void announce_tile(int32_t block, bool masked) {
    if constexpr (!kAnnounces) return;
    const uint32_t at = tiles_.stage();
    ptx::wait(shared_.tile_empty[at], tiles_.phase() ^ 1);
    if (ptx::is_leader()) {
      shared_.tiles[at] = KeyTile::make(block, masked || masks_all_);
      ptx::arrive(shared_.tile_full[at]);
    }
    __syncwarp();
    tiles_.advance();
  }

  __device__ __forceinline__ void run_unit(const cuda::RowTile& tile, int32_t head, int32_t skipped, int32_t blocks) {
    request_ = tile.request;
    keys_ = tile.keys;
    table_ = nullptr;
    if (p_.call.page_table.defined()) {
      table_ = p_.call.page_table.data + tile.request * p_.call.page_table.stride[0];
      table_stride_ = p_.call.page_table.stride[1];
    } else if (p_.call.page_indptr.defined()) {
      table_stride_ = p_.call.page_indices.stride[0];
      table_ = p_.call.page_indices.data + tile.first_entry * table_stride_;
    }
    if (p_.plan.has_classes) {
      walk_classes(tile, head, skipped, blocks);
    } else {
      walk_band(tile, head, skipped, blocks);
    }
  }

  __device__ __forceinline__ void walk_band(const cuda::RowTile& tile, int32_t head, int32_t skipped, int32_t blocks) {
    const Unmasked unmasked(p_, tile);
    for (int32_t block = tile.first_block + skipped, end = block + blocks; block < end; ++block) {
      announce_tile(block, block < unmasked.begin || block >= unmasked.end);
      load_tile(head, block);
    }
  }

  /// The blocks [begin, end) of which the band lets all rows see all keys.
  struct Unmasked {
    int32_t begin = 0, end = 0;
    __device__ __forceinline__ Unmasked(const DecodeParams& p, const cuda::RowTile& tile) {
      const int64_t row = int64_t{tile.keys} - tile.rows_count + tile.first_row, last_row = row + tile.row_count - 1;
      if (row < 0) return;
      const int64_t tail = tile.keys - tile.tail, keys = last_row >= tail ? tail : tile.keys;
      const int64_t first_key = max(last_row + p.call.diagonal_lo, int64_t{0}),
                    end_key = max(min(row + p.call.diagonal_hi + 1, keys), int64_t{0});
      begin = static_cast<int32_t>(min((first_key + cuda::kBlockKeys - 1) / cuda::kBlockKeys, int64_t{INT32_MAX}));
      end = static_cast<int32_t>(end_key / cuda::kBlockKeys);
    }
  };

  /// The live blocks by class bits, from the skipped-th on.
  __device__ __forceinline__ void walk_classes(const cuda::RowTile& tile, int32_t head, int32_t skipped,
                                               int32_t blocks) {
    const int64_t list = tile.list + (p_.plan.mask_heads == 1 ? 0 : head);
    const uint32_t *const live_bits = p_.plan.live_bits + list * p_.plan.words, *const full_bits = p_.plan.full_bits +
                                                                                                   list * p_.plan.words;
    const int32_t end = (tile.keys + cuda::kBlockKeys - 1) / cuda::kBlockKeys;
    int32_t left = blocks;
    for (int32_t word = 0; word < p_.plan.words && word * cuda::kBlocksOfWord < end && left > 0; ++word) {
      uint32_t live = __ldcg(live_bits + word);
      const uint32_t full = __ldcg(full_bits + word);
      const int32_t count = __popc(live);
      if (skipped >= count) {
        skipped -= count;
        continue;
      }
      for (; skipped > 0; --skipped) live &= live - 1;
      for (; live && left > 0; live &= live - 1, --left) {
        const int bit = __ffs(live) - 1;
        announce_tile(word * cuda::kBlocksOfWord + bit, !(full >> bit & 1));
        load_tile(head, word * cuda::kBlocksOfWord + bit);
      }
    }
    // Blocks that a plan has no room for, and past the last key one that stands for none.
    for (int32_t block = p_.plan.words * cuda::kBlocksOfWord + skipped; left > 0; ++block, --left) {
      announce_tile(min(block, end), true);
      load_tile(head, min(block, end));
    }
  }

  /// Asks for a tile's pages, and copies the tile before, whose pages have come by now.
  __device__ __forceinline__ void load_tile(int32_t head, int32_t block) {
    Boxes boxes;
    find_boxes(block, boxes);
    flush();
    waiting_ = boxes;
    head_ = head;
    waits_ = true;
  }
  __device__ __forceinline__ void flush() {
    if (waits_) copy();
    waits_ = false;
  }

  /// The beginnings of the lane's boxes of a tile: box lane + 32 n has the tile's keys from box_keys * (lane + 32 n)
  /// on.
  struct Boxes {
    int32_t entry[kLaneBoxes], row[kLaneBoxes];  ///< a table's, unchecked, so that nothing waits for them here
  };

  __device__ __forceinline__ void find_boxes(int32_t block, Boxes& boxes) const {
    find_box(block, 0, boxes);
    if (p_.box_keys >= cuda::kBlockKeys / 32) return;
#pragma unroll
    for (int n = 1; n < kLaneBoxes; ++n) find_box(block, n, boxes);
  }
  __device__ __forceinline__ void find_box(int32_t block, int n, Boxes& boxes) const {
    const int32_t in_tile = (static_cast<int32_t>(ptx::lane()) + 32 * n) * p_.box_keys,
                  key = block * cuda::kBlockKeys + in_tile;
    boxes.entry[n] = -1;
    boxes.row[n] = 0;
    if (in_tile >= cuda::kBlockKeys || key >= keys_) return;
    const int32_t page = table_ ? p_.key_page(key) : 0;
    boxes.entry[n] = table_ ? __ldg(table_ + page * table_stride_) : request_;
    boxes.row[n] = key - page * p_.page_size;
  }

  /// Copies K, or V, of the tile that waits.
  __device__ __forceinline__ void copy() {
#pragma unroll
    for (int part = 0; part < Traits::kParts; ++part) {
      const uint32_t slot = slots_.stage();
      uint64_t& full = kAnnounces ? shared_.k_full[slot] : shared_.v_full[slot];
      ptx::wait(kAnnounces ? shared_.k_empty[slot] : shared_.v_empty[slot], slots_.phase() ^ 1);
      if (ptx::is_leader()) ptx::arrive_expect(full, kPartBytes);
      __syncwarp();
      copy_box(slot, full, part, 0);
      if (p_.box_keys < cuda::kBlockKeys / 32) {
#pragma unroll
        for (int n = 1; n < kLaneBoxes; ++n) copy_box(slot, full, part, n);
      }
      slots_.advance();
    }
  }
  __device__ __forceinline__ void copy_box(uint32_t slot, uint64_t& full, int part, int n) {
    const int32_t key = (static_cast<int32_t>(ptx::lane()) + 32 * n) * p_.box_keys - part * Traits::kSlotKeys;
    if (key >= 0 && key < Traits::kSlotKeys) {
      // A page that is not there is one past the last, which TMA reads as zeros.
      const auto page =
          static_cast<int32_t>(min(static_cast<uint32_t>(waiting_.entry[n]), static_cast<uint32_t>(p_.pages)));
      auto* const to = (kAnnounces ? shared_.k[slot] : shared_.v[slot]) + key * 64;
#pragma unroll
      for (int column = 0; column < kBlocks; ++column)
        ptx::tma_load_once(to + column * Traits::kSlotKeys * 64, kAnnounces ? p_.k : p_.v, full,
                           {waiting_.row[n], 0, head_, page}, 64 * column);
    }
    __syncwarp();
  }

  const DecodeParams& p_;
  Shared& shared_;
  const bool masks_all_;
  ptx::RingPosition<Traits::kWorks> works_;
  ptx::RingPosition<Traits::kTiles> tiles_;
  ptx::RingPosition<Traits::kSlots> slots_;
  const int32_t* table_ = nullptr;  ///< the request's; null: keys are contiguous
  int64_t table_stride_ = 0;
  int32_t request_ = 0, keys_ = 0;
  Boxes waiting_{};
  int32_t head_ = 0;
  bool waits_ = false;
};

}  // namespace flashmask::sm90
