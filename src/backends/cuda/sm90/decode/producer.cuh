// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/cache/live_blocks.cuh"
#include "backends/cuda/cache/unit_walk.cuh"
#include "backends/cuda/ptx/tma_stream.cuh"
#include "backends/cuda/sm90/decode/dequantiser.cuh"
#include "backends/cuda/sm90/decode/row_access.cuh"
#include "backends/cuda/sm90/decode/traits.cuh"

namespace flashmask::sm90 {

/// The tensor that a producer warp copies, and its ring of slots.
template <typename Traits>
struct CopiedTensor {
  using Stored = typename Traits::Stored;
  const CUtensorMap& map;
  const cuda::CallRows& rows;
  int32_t dim;
  int blocks;  ///< each of 64 columns
  uint32_t part_bytes;
  Stored* slots;
  int slot_elements;
  uint64_t *full, *empty;  ///< empty is null over a cache of e4m3: a Dequantiser knows which slots it has read

  __device__ __forceinline__ static CopiedTensor keys(const DecodeParams& p, DecodeShared<Traits>& shared) {
    if constexpr (Traits::kFloat8) {
      return {p.k,
              p.k_rows,
              p.head_dim,
              Traits::kQkBlocks,
              Traits::kKeyCopyBytes,
              shared.float8.k[0],
              kElements<Traits::kQkBlocks>,
              shared.float8.k_copied,
              nullptr};
    } else {
      return {p.k,
              p.k_rows,
              p.head_dim,
              Traits::kQkBlocks,
              Traits::kKeyCopyBytes,
              shared.k[0],
              kElements<Traits::kQkBlocks>,
              shared.k_full,
              shared.k_empty};
    }
  }
  __device__ __forceinline__ static CopiedTensor values(const DecodeParams& p, DecodeShared<Traits>& shared) {
    if constexpr (Traits::kFloat8) {
      return {p.v,
              p.v_rows,
              p.head_dim_v,
              Traits::kVBlocks,
              Traits::kValueCopyBytes,
              shared.float8.v[0],
              kElements<Traits::kVBlocks>,
              shared.float8.v_copied,
              nullptr};
    } else {
      return {p.v,
              p.v_rows,
              p.head_dim_v,
              Traits::kVBlocks,
              Traits::kValueCopyBytes,
              shared.v[0],
              kElements<Traits::kVBlocks>,
              shared.v_full,
              shared.v_empty};
    }
  }

 private:
  template <int kBlocks>
  static constexpr int kElements = Traits::kCopiedKeys * kBlocks * 64;
};

/// A producer warp: walks the CTA's shares and loads K, or V. The warp of keys also announces units and tiles to the
/// other roles. All 32 lanes run it; each issues the copies of its box, or of its chunks of 16 bytes where keys are
/// gathered. Both warps run the same instructions, of which there are few: a CTA's first ones come from memory.
template <typename Traits>
class DecodeProducer {
 public:
  using Shared = DecodeShared<Traits>;
  using Stored = typename Traits::Stored;
  __device__ __forceinline__ DecodeProducer(const DecodeParams& p, Shared& shared, bool of_keys)
      : p_(p),
        shared_(shared),
        copied_(of_keys ? CopiedTensor<Traits>::keys(p, shared) : CopiedTensor<Traits>::values(p, shared)),
        dequantiser_(shared, of_keys),
        announces_(of_keys),
        masks_all_(p.needs_positions()) {}

  __device__ __forceinline__ void run() {
    if (const int32_t dealt = Traits::kTakesDealt ? p_.plan.shares[0].dealt : 0) {
      run_dealt(dealt);
    } else {
      run_shares();
    }
    dequantiser_.leave(slots_.count, 0);
    if (announces_) announce_end();
  }

 private:
  using Swizzle = ptx::Swizzle128;
  static constexpr bool kFloat8 = Traits::kFloat8;
  static constexpr int kLaneKeys = cuda::kBlockKeys / 32;

  __device__ __forceinline__ void run_shares() {
    for (int32_t n = static_cast<int32_t>(blockIdx.x); n < p_.plan.most_shares; n += static_cast<int32_t>(gridDim.x)) {
      const cuda::Share& share = p_.plan.shares[n];
      if (share.blocks > 0) {
        if constexpr (kFloat8) {
          run_float8_share(n, share);
        } else {
          run_share(n, share);
        }
      }
    }
  }
  /// As run_share, without what there are no registers for beside a Dequantiser: not a number more lives over copies.
  __device__ __forceinline__ void run_float8_share(int32_t n, const cuda::Share& share) {
    units_.begin(p_.plan, share);
    int32_t unit_left = 0;
#pragma unroll 1
    for (int32_t left = share.blocks; left >= 0; --left) {
      const bool is_first = left == share.blocks, is_last = left == 0;
      Places places;
      if (!is_last) {
        const bool is_new = unit_left == 0;
        const int32_t skipped = is_first ? share.skipped : 0;
        if (is_new) {
          if (!is_first) units_.next(p_.plan);
          unit_left = min(units_.live_blocks(p_.plan) - skipped, left);
          begin_unit(skipped);
        }
        const auto block = blocks_.template next<false>(p_);
        find(block.index, places);  // under the announcements
        if (is_new && announces_) announce_work(units_.part(p_, n, share, unit_left));
        announce_tile(block.index, block.masked);
        --unit_left;
      }
      if (!is_first) copy();  // the tile before, whose pages have come by now
      waiting_ = places;
      waiting_head_ = units_.head();
    }
  }
  __device__ __forceinline__ void run_share(int32_t n, const cuda::Share& share) {
    units_.begin(p_.plan, share);
    int32_t unit_left = 0;
    bool waits = false;  // a tile for its copy
#pragma unroll 1
    for (int32_t left = share.blocks; left > 0 || waits;) {
      const bool is_first = left == share.blocks, is_new = unit_left == 0;
      // Looks for another unit's blocks after the copy, since that waits for memory.
      const bool finds = left > 0 && !(Traits::kCopiesFirst && is_new && waits);
      Places places;
      if (finds) {
        const int32_t skipped = is_first ? share.skipped : 0;
        if (is_new) {
          if (!is_first) units_.next(p_.plan);
          unit_left = min(units_.live_blocks(p_.plan) - skipped, left);
          begin_unit(skipped);
          if (is_first) blocks_.begin_share(p_, share);
        }
        const auto block = blocks_.template next<Traits::kConsumers == 1>(p_);
        find(block.index, places);  // under the announcements
        if (is_new && announces_) announce_work(units_.part(p_, n, share, unit_left));
        announce_tile(block.index, block.masked);
        --unit_left;
        --left;
      }
      if (waits) copy();  // the tile before, whose pages have come by now
      waits = finds;
      waiting_ = places;
      waiting_head_ = units_.head();
      if constexpr (Traits::kDropsKeys) waiting_kept_ = keeps_keys();
    }
  }
  /// True if L2 is to keep the unit's keys, which other row tiles read: not those that few rows of a forest see.
  __device__ __forceinline__ bool keeps_keys() const {
    return !p_.plan.is_forest() || units_.tile().row_count * units_.tile().head_count > cuda::kPackedRows;
  }
  __device__ __forceinline__ void begin_unit(int32_t skipped) {
    blocks_.begin(p_, units_.tile(), units_.head(), skipped);
    split_end_ = 0;
    find_table();
  }

  /// The CTA's units of `tiles` row tiles.
  __device__ __forceinline__ void run_dealt(int32_t tiles) {
    cuda::DealtUnits dealt(tiles * p_.plan.heads_kv, static_cast<int32_t>(gridDim.x), static_cast<int32_t>(blockIdx.x));
    bool is_first = true;
#pragma unroll 1
    for (; dealt.is_left(); dealt.advance()) {
      if (!dealt.has_unit()) continue;
      units_.take(p_.plan, tiles, dealt.unit());
      begin_unit(0);
      const Work work = units_.whole(p_);
#pragma unroll 1
      for (int32_t left = work.tiles; left > 0; --left) {
        Places places;
        const auto block = blocks_.template next<Traits::kConsumers == 1>(p_);
        find(block.index, places);
        if (left == work.tiles && announces_) announce_work(work);
        announce_tile(block.index, block.masked);
        if (!is_first) copy();
        waiting_ = places;
        waiting_head_ = units_.head();
        is_first = false;
      }
    }
    if (!is_first) copy();
  }

  // --- Announcements -------------------------------------------------------------------------------

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
  /// True if a block begins a split behind another of its unit.
  __device__ __forceinline__ bool begins_next_split(int32_t block) {
    if (!Traits::kFolds || !p_.plan.folds() || block < split_end_) return false;
    const bool is_first = split_end_ == 0;
    split_end_ = p_.plan.own_split_end(block, (units_.tile().keys + cuda::kBlockKeys - 1) / cuda::kBlockKeys);
    return !is_first;
  }
  __device__ __forceinline__ void announce_tile(int32_t block, bool masked) {
    if (!announces_) return;
    const bool next_split = begins_next_split(block);
    const uint32_t at = tiles_.stage();
    ptx::wait(shared_.tile_empty[at], tiles_.phase() ^ 1);
    delay<Role::kProducer>();
    if (ptx::is_leader()) {
      shared_.tiles[at] = KeyTile::make(block, masked || masks_all_, next_split);
      ptx::arrive(shared_.tile_full[at]);
    }
    __syncwarp();
    tiles_.advance();
  }

  // --- Where keys lie ------------------------------------------------------------------------------

  __device__ __forceinline__ void find_table() {
    table_ = nullptr;
    if (p_.call.page_table.defined()) {
      table_ = p_.call.page_table.data + units_.tile().request * p_.call.page_table.stride[0];
      table_stride_ = p_.call.page_table.stride[1];
    } else if (p_.call.page_indptr.defined()) {
      table_stride_ = p_.call.page_indices.stride[0];
      table_ = p_.call.page_indices.data + units_.tile().first_entry * table_stride_;
    }
  }

  /// The places of a lane's keys of a tile: its box's first, or if they are gathered, or of e4m3, keys lane + 32 n.
  struct Places {
    int32_t entry[kLaneKeys], row[kLaneKeys];  ///< a table's, unchecked, so that nothing waits for them here
  };
  __device__ __forceinline__ void find(int32_t block, Places& places) const {
    find_key(block, 0, places);
    if (!kFloat8 && !p_.gathers) return;
#pragma unroll
    for (int n = 1; n < kLaneKeys; ++n) find_key(block, n, places);
  }
  __device__ __forceinline__ void find_key(int32_t block, int n, Places& places) const {
    const int32_t in_tile = static_cast<int32_t>(ptx::lane()) * (kFloat8 ? 1 : p_.box_keys) + 32 * n,
                  key = block * cuda::kBlockKeys + in_tile;
    places.entry[n] = -1;
    places.row[n] = 0;
    if (in_tile >= cuda::kBlockKeys || key >= units_.tile().keys) return;
    const int32_t page = table_ ? p_.key_page(key) : 0;
    places.entry[n] = table_ ? __ldg(table_ + page * table_stride_) : units_.tile().request;
    places.row[n] = key - page * p_.page_size;
  }

  // --- Copies --------------------------------------------------------------------------------------

  /// Copies K, or V, of the tile that waits.
  __device__ __forceinline__ void copy() {
    [[maybe_unused]] constexpr int kUnroll = kFloat8 ? 1 : Traits::kParts;
#pragma unroll kUnroll
    for (int part = 0; part < Traits::kCopyParts; ++part) {
      const uint32_t slot = slots_.stage();
      if constexpr (kFloat8) {
        dequantiser_.leave(slots_.count, Traits::kCopySlots - 1);
      } else {
        ptx::wait(copied_.empty[slot], slots_.phase() ^ 1);
      }
      delay<Role::kProducer>();
      Stored* const to = copied_.slots + slot * copied_.slot_elements;
      if (p_.gathers) [[unlikely]] {
        gather(to, copied_.full[slot], part);
      } else {
        copy_boxes(to, copied_.full[slot], part);
      }
      slots_.advance();
    }
  }
  __device__ __forceinline__ void copy_boxes(Stored* slot, uint64_t& full, int part) const {
    if (ptx::is_leader()) ptx::arrive_expect(full, copied_.part_bytes);
    __syncwarp();
    const int32_t key = first_box_key(part);
    if (key >= 0 && key < Traits::kCopiedKeys) {
      const Place place = place_of(kFloat8 ? part : 0);
      // A page that is not there is one past the last, which TMA reads as zeros.
      const auto page = static_cast<int32_t>(min(static_cast<uint32_t>(place.entry), static_cast<uint32_t>(p_.pages)));
#pragma unroll
      for (int column = 0; column < kMostBlocks; ++column) {
        if (column >= copied_.blocks) continue;
        Stored* const to = slot + (column * Traits::kCopiedKeys + key) * 64;
        const ptx::BoxOrigin from{place.row, 0, waiting_head_, page};
        if (Traits::kKeepsKeys && (!Traits::kDropsKeys || waiting_kept_)) {
          ptx::tma_load(to, copied_.map, full, from, 64 * column);
        } else {
          ptx::tma_load_once(to, copied_.map, full, from, 64 * column);
        }
      }
    }
    __syncwarp();
  }
  /// The first key, counted from the part's, of the lane's box of a part; one that the part does not have: no box.
  __device__ __forceinline__ int32_t first_box_key(int part) const {
    const auto lane = static_cast<int32_t>(ptx::lane());
    if constexpr (kFloat8) return (lane & (p_.box_keys - 1)) == 0 ? lane : -1;  // a power of two
    return lane * p_.box_keys - part * Traits::kCopiedKeys;
  }
  struct Place {
    int32_t entry, row;
  };
  /// The place of the lane's n-th key of the tile that waits.
  __device__ __forceinline__ Place place_of(int n) const {
    Place place{waiting_.entry[0], waiting_.row[0]};
#pragma unroll
    for (int i = 1; i < kLaneKeys; ++i) {  // registers have no indices
      if (n == i) place = {waiting_.entry[i], waiting_.row[i]};
    }
    return place;
  }

  /// Copies a part of a tile key by key: TMA is slow with boxes of few keys, and takes aligned rows alone. Keys and
  /// columns that are not there become zeros.
  __device__ __forceinline__ void gather(Stored* slot, uint64_t& full, int part) const {
#pragma unroll 1
    for (int n = 0; n < Traits::kCopiedKeys / 32; ++n) {
      const uint64_t address = key_address(part * Traits::kCopiedKeys / 32 + n);
      Stored* const rows = slot + 32 * n * Swizzle::kColumns;
      if (p_.keys_aligned) {
        gather_keys<true>(rows, address);
      } else {
        gather_keys<false>(rows, address);
      }
    }
    arrive_after(cuda::RowCopy{p_.keys_aligned}, full);
  }
  /// The address of the lane's n-th key, or value; 0: it is not there.
  __device__ __forceinline__ uint64_t key_address(int n) const {
    const Place place = place_of(n);
    if (static_cast<uint32_t>(place.entry) >= static_cast<uint32_t>(p_.pages)) return 0;
    return reinterpret_cast<uint64_t>(copied_.rows.template at<Stored>(place.entry, place.row, waiting_head_));
  }
  /// Copies 32 keys to the rows from `to` on. Each lane has the address of one, and so many copy 64 columns of a key as
  /// these have chunks.
  template <bool kAligned>
  __device__ __forceinline__ void gather_keys(Stored* to, uint64_t address) const {
    constexpr uint32_t kRowBytes = Swizzle::kColumns * sizeof(Stored), kChunks = kRowBytes / 16,
                       kKeysAtOnce = 32 / kChunks;
    constexpr int kUnroll = kAligned ? 4 : 1;
    const uint32_t lane = ptx::opaque(ptx::lane()), chunk = lane % kChunks;  // registers are few
#pragma unroll kUnroll
    for (uint32_t first = 0; first < 32; first += kKeysAtOnce) {
      const uint32_t key = first + lane / kChunks, place = kFloat8 ? 16 * chunk : Swizzle::chunk(key, chunk);
      const auto* const from = reinterpret_cast<const Stored*>(__shfl_sync(0xffffffff, address, key));
      unsigned char* const row = reinterpret_cast<unsigned char*>(to) + key * kRowBytes;
#pragma unroll
      for (int column = 0; column < kMostBlocks; ++column) {
        const auto element = Swizzle::kColumns * column + static_cast<int32_t>(16 / sizeof(Stored) * chunk);
        if (column < copied_.blocks)
          cuda::RowCopy{kAligned}.copy_chunk(row + column * Traits::kCopiedKeys * kRowBytes + place, from + element,
                                             from && element < copied_.dim, copied_.dim - element);
      }
    }
  }
  static constexpr int kMostBlocks = Traits::kQkBlocks > Traits::kVBlocks ? Traits::kQkBlocks : Traits::kVBlocks;

  const DecodeParams& p_;
  Shared& shared_;
  const CopiedTensor<Traits> copied_;
  std::conditional_t<kFloat8, Dequantiser<Traits>, NoDequantiser<Traits>> dequantiser_;
  const bool announces_, masks_all_;
  ptx::RingPosition<Traits::kWorks> works_;
  ptx::RingPosition<Traits::kTiles> tiles_;
  ptx::RingPosition<Traits::kCopySlots> slots_;
  cuda::UnitWalk units_;
  cuda::LiveBlocks blocks_;
  const int32_t* table_;  ///< the request's; null: keys are contiguous
  int64_t table_stride_ = 0;
  int32_t split_end_ = 0;  ///< the end of the split under way; 0: none of the unit's is
  Places waiting_{};
  int32_t waiting_head_ = 0;
  bool waiting_kept_ = true;
};

}  // namespace flashmask::sm90
