// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/device/arrivals.cuh"
#include "backends/cuda/device/delay.cuh"
#include "backends/cuda/device/plan_bits.cuh"
#include "backends/cuda/device/tile_walk.cuh"
#include "backends/cuda/ptx/barrier.cuh"
#include "backends/cuda/ptx/tma.cuh"
#include "backends/cuda/sm90/common/padding.cuh"
#include "backends/cuda/sm90/forward/params.h"
#include "backends/cuda/sm90/forward/traits.cuh"

namespace flashmask::sm90 {

/// The producer warp: walks the work tiles and their live key blocks, announces both to the other roles, and loads Q, K
/// and V. All 32 lanes run it; lane 0 issues the copies.
template <typename Traits>
class Producer {
 public:
  using Shared = SharedStorage<Traits>;
  using Params = typename Traits::Params;
  __device__ __forceinline__ Producer(const Params& p, Shared& shared) : p_(p), shared_(shared) {}

  __device__ __forceinline__ void run() {
    uint32_t next = blockIdx.x;
    while (next < p_.schedule.work_tiles) {
      const uint32_t n = next;
      next = claim_next();
      run_work_tile(n);
      load_late_values();
      next = __shfl_sync(0xffffffff, next, 0);
    }
    announce({0, 0, 0, WorkTile::kEnd}, 0);
    if (ptx::is_leader() && p_.executed) atomicAdd(p_.executed, executed_);
  }

 private:
  using Blocks = typename Traits::Blocks;
  using Walk = cuda::RowTileWalk<Traits::kConsumers, Tile::kBits, PlanBits>;

  /// Called early, so that the counter's answer is there when this work tile is done. Valid in lane 0.
  __device__ __forceinline__ uint32_t claim_next() const {
    if (!p_.schedule.next || !ptx::is_leader()) return p_.schedule.work_tiles;
    return gridDim.x + atomicAdd(p_.schedule.next, 1u);
  }

  __device__ __forceinline__ void run_work_tile(uint32_t n) {
    const cuda::WorkTilePlace place(p_.schedule, p_.heads_q, n);
    const auto head = static_cast<int32_t>(place.head), batch = static_cast<int32_t>(place.batch);
    const auto kv_head = static_cast<int32_t>(place.head / p_.query_heads_per_kv_head);
    padding_ = PaddingStart::after(p_.extents.keys(place.batch, p_.seqlen_k), p_.seqlen_k);
    const auto produce = [&](int32_t key_block, uint32_t live, uint32_t full) {
      wait_for_keys(key_block, place.batch);
      load_tile(key_block, classes_of(key_block, live, full), kv_head, batch);
    };
    if (p_.element_mask == ElementMask::kDense) {
      const auto row = static_cast<int32_t>(place.rank) * Traits::kRows;
      announce_early({row, head, batch, p_.key_blocks}, p_.dense.place.offset(place.batch, place.head));
      constexpr uint32_t kAllLive = Tile::kFirstBits & ((1u << Tile::kBits * Traits::kConsumers) - 1);
      for (int32_t key_block = 0; key_block < p_.key_blocks; ++key_block) produce(key_block, kAllLive, 0);
      return;
    }
    const uint32_t mask = cuda::mask_index(p_.plan, place.batch, place.head);
    const int32_t row_tile =
        __ldg(p_.plan.row_tile_order + static_cast<int64_t>(mask) * p_.schedule.tiles + place.rank);
    Walk walk(p_.plan, mask, row_tile);
    int32_t tiles = 0;
    for (int32_t word = (p_.plan.words_per_row - 1) & ~31; word >= 0; word -= 32) {
      walk.load(word);
      tiles += walk.count();
    }
    announce_early({row_tile * Traits::kRows, head, batch, tiles}, p_.mask.place.offset(place.batch, place.head));
    // The words of the first 32 x 32 key blocks are still at hand.
    for (int32_t word = 0; word < p_.plan.words_per_row; word += 32) {
      if (word > 0) walk.load(word);
      walk.for_each(word, produce);
    }
  }

  /// A work tile is announced before its tiles. With one buffer of Q the announcement waits until all warps have
  /// finished QK^T of the previous work tile, so it comes after the first part of K, which may be there earlier.
  __device__ __forceinline__ void announce_early(const WorkTile& work, int64_t mask_offset) {
    if (Traits::kQBuffers > 1 || work.tiles == 0) {
      announce(work, mask_offset);
    } else {
      late_ = {work, mask_offset, true};
    }
  }
  __device__ __forceinline__ void announce_late() {
    if (Traits::kQBuffers > 1 || !late_.waits) return;
    announce(late_.work, late_.mask_offset);
    late_.waits = false;
  }

  /// Announces a work tile to the other roles, and loads its rows of Q if they will be read.
  __device__ __forceinline__ void announce(const WorkTile& work, int64_t mask_offset) {
    delay<Role::kProducer>();
    const uint32_t slot = q_ring_.stage();
    ptx::wait(shared_.q_empty[slot], q_ring_.phase() ^ 1);
    if (ptx::is_leader()) {
      shared_.work[slot] = work;
      shared_.mask_offset[slot] = mask_offset;
      if (work.tiles > 0) {
        ptx::arrive_expect(shared_.q_full[slot], Traits::kQBytes);
        Blocks::template load<Traits::kQkBlocks, Traits::kRows>(shared_.q[slot], p_.q, shared_.q_full[slot],
                                                                {work.row, 0, work.head, work.batch});
        executed_ += work.tiles;
      } else {
        ptx::arrive(shared_.q_full[slot]);
      }
    }
    q_ring_.advance();
  }

  /// Numbers the partial granules of a tile.
  __device__ __forceinline__ uint32_t classes_of(int32_t key_block, uint32_t live, uint32_t full) {
    // Keys past the last are hidden: the last block is full only if it is whole.
    if ((key_block + 1) * Traits::kKeys > p_.seqlen_k) full = 0;
    const uint32_t partial = live & ~full, classes = full | partial << 2 | (partial * 3 & numbers_);
    numbers_ = (numbers_ + partial) & 3 * Tile::kFirstBits;
    return classes;
  }

  /// Waits for keys that are still arriving, and fences what all lanes have acquired for the loads, which read it by
  /// another proxy. What ptxas cannot tell to be the same in all lanes makes it spill, so all lanes wait, and agree on
  /// the least that one has seen.
  __device__ __forceinline__ void wait_for_keys(int32_t key_block, uint32_t batch) {
    if (!p_.arrivals.needed) return;
    const uint32_t at = batch * p_.arrivals.entry_stride + static_cast<uint32_t>(key_block);
    const uint32_t needed = ptx::uniform(ptx::load_here(p_.arrivals.needed, at));
    if (needed <= arrived_) return;
    delay<Role::kProducer>();
    arrived_ = __reduce_min_sync(0xffffffff, cuda::wait_for_pieces(p_.arrivals, needed));
    ptx::fence_async_proxy_global();
  }

  /// V of a tile: the tile's number, and where in the tensor map it is.
  struct Values {
    uint32_t tile;
    int32_t row, kv_head, batch;
  };

  __device__ __forceinline__ void load_tile(int32_t key_block, uint32_t classes, int32_t kv_head, int32_t batch) {
    const uint32_t stage = kv_ring_.stage();
    const int32_t row = key_block * Traits::kKeys;
#pragma unroll
    for (int part = 0; part < Traits::kKParts; ++part) {
      delay<Role::kProducer>();
      ptx::wait(shared_.k_empty[stage][part], kv_ring_.phase() ^ 1);
      if (ptx::is_leader()) {
        if (part == 0) shared_.tile[stage] = Tile::make(key_block, classes);
        ptx::arrive_expect(shared_.k_full[stage][part], Traits::kKPartBytes);
        constexpr int kBlocks = Traits::kBlocksOfKPart;
        Blocks::template load<kBlocks, Traits::kKeys>(shared_.k[stage] + part * kBlocks * Traits::kKeys * 64, p_.k,
                                                      shared_.k_full[stage][part],
                                                      {row, part * kBlocks, kv_head, batch});
      }
      if (part == 0) announce_late();
    }
    const Values values{kv_ring_.count, row, kv_head, batch};
    if constexpr (Traits::kKeysAhead) {
      load_late_values();
      late_values_ = values;
      values_are_late_ = true;
    } else {
      load(values);
    }
    kv_ring_.advance();
  }

  __device__ __forceinline__ void load(const Values& values) {
#pragma unroll
    for (int part = 0; part < Traits::kVParts; ++part) {
      const auto ring = value_ring<Traits>(values.tile, part);
      delay<Role::kProducer>();
      ptx::wait(shared_.v_empty[ring.stage()], ring.phase() ^ 1);
      constexpr int kKeys = Traits::kKeysOfVPart;
      const int32_t row = values.row + part * kKeys, padding = padding_.in_tile(row);
      uint64_t& full = shared_.v_full[ring.stage()];
      uint64_t& copied = padding < kKeys ? shared_.padded_full : full;
      if (ptx::is_leader()) {
        ptx::arrive_expect(copied, Traits::kVPartBytes);
        Blocks::template load<Traits::kVBlocks, kKeys>(shared_.v[ring.stage()], p_.v, copied,
                                                       {row, 0, values.kv_head, values.batch});
      }
      if (padding < kKeys) hand_over_padded(shared_.v[ring.stage()], padding, full);
    }
  }
  /// Zeroes the padding of a part of V once it is there: weights of 0 times NaN are NaN.
  __device__ __forceinline__ void hand_over_padded(typename Traits::Element* values, int32_t padding, uint64_t& full) {
    ptx::wait(shared_.padded_full, padded_phase_);
    padded_phase_ ^= 1;
    clear_padding<Traits::kKeysOfVPart, Traits::kVBlocks>(values, padding);
    ptx::arrive_once(full);
  }
  /// V of the previous tile, if K comes ahead.
  __device__ __forceinline__ void load_late_values() {
    if (!Traits::kKeysAhead || !values_are_late_) return;
    load(late_values_);
    values_are_late_ = false;
  }

  struct LateAnnouncement {
    WorkTile work;
    int64_t mask_offset;
    bool waits;
  };

  const Params& p_;
  Shared& shared_;
  LateAnnouncement late_{};
  Values late_values_{};
  bool values_are_late_ = false;
  PaddingStart padding_;  ///< the work tile's, in V
  uint32_t padded_phase_ = 0;
  ptx::RingPosition<Traits::kQBuffers> q_ring_;
  ptx::RingPosition<Traits::kStages> kv_ring_;
  uint32_t executed_ = 0;
  uint32_t arrived_ = 0;  ///< pieces of keys that this warp knows to have arrived
  uint32_t numbers_ = 0;  ///< each warpgroup's next partial granule, modulo 4, laid out as a tile's classes
};

}  // namespace flashmask::sm90
