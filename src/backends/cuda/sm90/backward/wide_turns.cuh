// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/sm90/backward/dq_accumulator.cuh"
#include "backends/cuda/sm90/backward/wide_traits.cuh"

namespace flashmask::sm90::bwd {

/// What a wide kernel has in place of a store warp where its consumers add dq from registers: in deterministic mode it
/// waits for a tile's turn in their stead, from the moment the tile is announced, and passes the turn on when they have
/// added. Each stage has one.
template <typename Traits>
class TurnWarp : DqAccumulator<Traits> {
 public:
  using Base = DqAccumulator<Traits>;
  using Shared = SharedStorage<Traits>;
  using Params = typename Traits::Params;
  __device__ __forceinline__ TurnWarp(const Params& p, Shared& shared, uint32_t stage) : Base(p, shared, stage) {}

  __device__ __forceinline__ void run() {
    uint32_t added_phase = 0;
    for (uint32_t phase = 0;; phase ^= 1) {
      delay<Role::kStore>();
      ptx::wait(shared_.tile_full[stage_], phase);
      const uint32_t flags = ptx::from_leader(shared_.tile[stage_].flags);
      if (flags & Tile::kEnd) break;
      const bool takes_turn = p_.dq_sums.deterministic && !(flags & Tile::kNothing);
      const auto tile = QueryTile::from_leader(shared_.tile[stage_].query);
      const uint32_t turn = takes_turn ? this->turn_of(tile, ptx::from_leader(shared_.tile[stage_].key_tile)) : 0;
      ptx::arrive_once(shared_.q_empty[stage_]);
      if (!takes_turn) continue;
      delay<Role::kStore>();
      if (ptx::is_leader()) take_turn(tile.index, turn, added_phase);
      added_phase ^= 1;
      __syncwarp();
    }
  }

 private:
  using Base::p_, Base::shared_, Base::stage_;

  __device__ __forceinline__ void take_turn(uint32_t query_tile, uint32_t turn, uint32_t added_phase) const {
    uint32_t* progress = p_.dq_sums.progress + query_tile;
    Base::wait_for_turn(progress, turn);
    ptx::arrive(shared_.dq.turn[stage_]);
    ptx::wait(shared_.dq.added[stage_], added_phase);
    ptx::add_release(progress, ~0u);
  }
};

}  // namespace flashmask::sm90::bwd
