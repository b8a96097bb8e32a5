// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/device/delay.cuh"
#include "backends/cuda/ptx/barrier.cuh"
#include "backends/cuda/ptx/registers.cuh"
#include "backends/cuda/ptx/tma.cuh"
#include "backends/cuda/sm90/backward/params.h"
#include "backends/cuda/sm90/backward/traits.cuh"

namespace flashmask::sm90::bwd {

/// A store warp: adds the tiles' parts of dq to their sums in global memory, the first one by storing it. Each stage
/// has one, so that one can wait for its part to arrive while the other takes the next tile.
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
      const uint32_t query_tile = ptx::from_leader(shared_.tile[stage_].query.index);
      ptx::arrive_once(shared_.q_empty[stage_]);
      if (adds) delay<Role::kStore>();
      if (adds && ptx::is_leader()) add(query_tile, parts & 1);
      parts += adds;
      __syncwarp();
    }
    if (ptx::is_leader()) ptx::bulk_wait();
  }

 protected:
  /// Adds the consumers' part to the sums of query tile `index`.
  __device__ __forceinline__ void add(uint32_t index, uint32_t phase) const {
    uint32_t* progress = p_.dq_sums.progress + index;
    const uint32_t seen = ptx::load_acquire(progress);
    ptx::wait(shared_.dq_full[stage_], phase);
    const bool first = claim_first(progress, seen);
    write_part(p_.dq_sums.sums + static_cast<int64_t>(index) * Blocks::kTileFloats, first);
    if (first) publish(progress);
  }

  /// Lets others add once the first part is in memory.
  __device__ __forceinline__ static void publish(uint32_t* progress) {
    ptx::bulk_wait();
    ptx::fence_async_proxy_global();
    ptx::add_release(progress, Progress::kStored);
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
  /// Returns when the numbers have left shared memory.
  template <int kFloats>
  __device__ __forceinline__ void write(float* to, const float* from, uint64_t& empty, bool first) const {
    constexpr uint32_t kBytes = kFloats * sizeof(float);
    ptx::fence_async_proxy_global();
    if (first) {
      ptx::bulk_store(to, from, kBytes);
    } else if (sums_integers<Traits>(p_)) {
      ptx::bulk_add_integers(to, from, kBytes);
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
