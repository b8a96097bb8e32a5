// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/common/delay.cuh"
#include "backends/cuda/ptx/barrier.cuh"
#include "backends/cuda/ptx/tensor_core.cuh"
#include "backends/cuda/ptx/tma.cuh"
#include "backends/cuda/sm90/backward/params.h"
#include "backends/cuda/sm90/backward/traits.cuh"

namespace flashmask::sm90::grad {

/// A store warp: adds the tiles' parts of dq to their sums in global memory. There is one for each stage, so that in
/// deterministic mode one waits for its turn, or for its sums to arrive, while the other takes the next tile.
template <typename Traits>
class RowGradientAdder {
 public:
  using Shared = SharedStorage<Traits>;
  __device__ __forceinline__ RowGradientAdder(const BackwardParams& p, Shared& shared, uint32_t stage)
      : p_(p), shared_(shared), stage_(stage) {}

  __device__ __forceinline__ void run() {
    uint32_t tiles = 0;
    for (uint32_t phase = 0;; phase ^= 1) {
      delay<Role::kStore>();
      ptx::wait(shared_.tile_full[stage_], phase);
      const Tile& tile = shared_.tile[stage_];
      const uint32_t flags = tile.flags, sums = tile.sums;
      if (flags & Tile::kEnd) break;
      const bool something = !(flags & Tile::kNothing);
      const uint32_t turn = something && p_.dq.turns ? turn_of(tile) : 0;
      __syncwarp();
      if (leader()) ptx::arrive(shared_.q_empty[stage_]);
      if (something) add(sums, turn, tiles++ & 1);
      __syncwarp();
    }
    if (leader()) ptx::bulk_wait();
  }

 private:
  __device__ __forceinline__ static bool leader() { return threadIdx.x % 32 == 0; }

  /// How many key tiles are added to this query tile before this one: those that see some of its rows and come later in the
  /// sequence.
  __device__ __forceinline__ uint32_t turn_of(const Tile& tile) const {
    if (p_.dense.given) return p_.schedule.key_tiles - 1 - tile.key_tile;
    const int32_t first_row = tile.row_tile * Traits::kGranules;
    const int32_t rows = min(Traits::kGranules, p_.plan.row_granules - first_row);
    const uint32_t* live =
        p_.plan.row_live + (static_cast<int64_t>(tile.mask) * p_.plan.row_granules + first_row) * p_.plan.words_per_row;
    const int32_t own = tile.key_tile / 32;
    uint32_t later = 0;
    for (int32_t word = own + static_cast<int32_t>(threadIdx.x % 32); word < p_.plan.words_per_row; word += 32) {
      uint32_t bits = __ldg(live + word);
      if (Traits::kGranules == 2 && rows == 2) bits |= __ldg(live + p_.plan.words_per_row + word);
      if (word == own) bits &= ~1u << tile.key_tile % 32;
      later += __popc(bits);
    }
    return __reduce_add_sync(0xffffffff, later);
  }

  __device__ __forceinline__ void add(uint32_t sums, uint32_t turn, uint32_t phase) const {
    delay<Role::kStore>();
    ptx::wait(shared_.dq_full[stage_], phase);
    if (!leader()) return;
    uint32_t* turns = p_.dq.turns ? p_.dq.turns + sums : nullptr;
    if (turns) {
      while (ptx::load_acquire(turns) != turn) {
      }
      ptx::fence_async_proxy_global();
    }
    constexpr int kFloats = Fragments<Traits::kHeadDim>::kTileFloats;
    ptx::bulk_add(p_.dq.sums + static_cast<int64_t>(sums) * kFloats, &shared_.out[0][0], kFloats * sizeof(float));
    ptx::bulk_commit();
    ptx::bulk_wait_read();
    ptx::arrive(shared_.dq_empty);
    if (!turns) return;
    ptx::bulk_wait();
    ptx::fence_async_proxy_global();
    ptx::add_release(turns, 1);
  }

  const BackwardParams& p_;
  Shared& shared_;
  const uint32_t stage_;
};

}  // namespace flashmask::sm90::grad
