// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/attention/plan_bits.cuh"
#include "backends/cuda/common/delay.cuh"
#include "backends/cuda/ptx/barrier.cuh"
#include "backends/cuda/ptx/registers.cuh"
#include "backends/cuda/ptx/tma.cuh"
#include "backends/cuda/sm90/backward/params.h"
#include "backends/cuda/sm90/backward/traits.cuh"

namespace flashmask::sm90::bwd {

/// A store warp: adds the tiles' parts of dq to their sums in global memory, the first one by storing it. Each stage
/// has one, so that one can wait for its turn, or for its part to arrive, while the other takes the next tile.
template <typename Traits>
class DqAccumulator {
 public:
  using Shared = SharedStorage<Traits>;
  using Params = typename Traits::Params;
  using Blocks = DqBlocks<Traits>;
  __device__ __forceinline__ DqAccumulator(const Params& p, Shared& shared, uint32_t stage)
      : p_(p), shared_(shared), stage_(stage) {}

  __device__ __forceinline__ void run() {
    uint32_t parts = 0;
    for (uint32_t phase = 0;; phase ^= 1) {
      delay<Role::kStore>();
      ptx::wait(shared_.tile_full[stage_], phase);
      const uint32_t flags = ptx::from_leader(shared_.tile[stage_].flags);
      if (flags & Tile::kEnd) break;
      const bool adds = !(flags & (Tile::kNothing | Tile::kAlone));
      const auto tile = QueryTile::from_leader(shared_.tile[stage_].query);
      const uint32_t turn =
          adds && p_.dq_sums.deterministic ? turn_of(tile, ptx::from_leader(shared_.tile[stage_].key_tile)) : 0;
      ptx::arrive_once(shared_.q_empty[stage_]);
      if (adds) delay<Role::kStore>();
      if (adds && ptx::is_leader()) add(tile.index, turn, parts & 1);
      parts += adds;
      __syncwarp();
    }
    if (ptx::is_leader()) ptx::bulk_wait();
  }

 protected:
  /// How many key tiles are pending when it is a tile's turn: its own and those of earlier keys.
  __device__ __forceinline__ uint32_t turn_of(const QueryTile& tile, int32_t key_tile) const {
    const uint32_t key_tiles = static_cast<uint32_t>(key_tile) + 1;
    if (p_.dense.given) return key_tiles;
    constexpr uint32_t kOfBlock = Traits::kKeyTilesOfBlock;
    // Its own block is live, and counts as many key tiles as do not come after it.
    return kOfBlock * cuda::live_key_tiles<Traits::kGranules>(p_.plan, cuda::mask_index(p_.plan, tile.batch, tile.head),
                                                              tile.row_tile, (key_tiles - 1) / kOfBlock + 1) -
           (kOfBlock - 1 - (key_tiles - 1) % kOfBlock);
  }

  /// Adds the consumers' part to the sums of query tile `index`.
  __device__ __forceinline__ void add(uint32_t index, uint32_t turn, uint32_t phase) const {
    uint32_t* progress = p_.dq_sums.progress + index;
    const bool deterministic = p_.dq_sums.deterministic;
    const uint32_t seen = deterministic ? 0 : ptx::load_acquire(progress);
    ptx::wait(shared_.dq_full[stage_], phase);
    const bool first = deterministic ? wait_for_turn(progress, turn) : claim_first(progress, seen);
    write_part(p_.dq_sums.sums + static_cast<int64_t>(index) * Blocks::kTileFloats, first);
    if (!first && !deterministic) return;  // no other warp waits for it
    publish(progress, first);
  }

  __device__ __forceinline__ static void publish(uint32_t* progress, bool first) {
    ptx::bulk_wait();
    ptx::fence_async_proxy_global();
    ptx::add_release(progress, first ? Progress::kStored - 1 : ~0u);
  }

  /// Waits, and returns whether this part is the first.
  __device__ __forceinline__ static bool wait_for_turn(const uint32_t* progress, uint32_t turn) {
    uint32_t seen;
    do {
      seen = ptx::load_acquire(progress);
    } while ((seen & Progress::kPending) != turn);
    return !(seen & Progress::kStored);
  }

  /// Claims the first part, or waits until it is stored. Only a warp whose part has arrived may claim it: one that
  /// still waited for its consumers could wait for a warp that waits for it.
  __device__ __forceinline__ static bool claim_first(uint32_t* progress, uint32_t seen) {
    if (seen & Progress::kStored) return false;
    if (!(atomicOr(progress, Progress::kClaimed) & Progress::kClaimed)) return true;
    while (!(ptx::load_acquire(progress) & Progress::kStored)) {
    }
    return false;
  }

  __device__ __forceinline__ void write_part(float* to, bool first) const {
    write<Blocks::kTileFloats>(to, shared_.staging[0], shared_.dq_empty, first);
  }
  /// Returns when the floats have left shared memory.
  template <int kFloats>
  __device__ __forceinline__ static void write(float* to, const float* from, uint64_t& empty, bool first) {
    constexpr uint32_t kBytes = kFloats * sizeof(float);
    ptx::fence_async_proxy_global();
    if (first) {
      ptx::bulk_store(to, from, kBytes);
    } else {
      ptx::bulk_add(to, from, kBytes);
    }
    ptx::bulk_commit();
    ptx::bulk_wait_read();
    ptx::arrive(empty);
  }

  const Params& p_;
  Shared& shared_;
  const uint32_t stage_;
};

}  // namespace flashmask::sm90::bwd
