// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/sm90/backward/columns/dq_accumulator.cuh"
#include "backends/cuda/sm90/backward/wide/traits.cuh"

namespace flashmask::sm90::bwd {

/// The store warp of a wide kernel's consumer: a DqAccumulator that orders among key tiles the consumer's columns of a
/// query tile, whose blocks pass through its staging tile one after the other. A consumer that has written
/// a block waits for nothing but this warp until it has written the next one of the tile; so the columns may be claimed
/// when the first is there.
template <typename Traits>
class WideAccumulator : DqAccumulator<Traits> {
 public:
  using Base = DqAccumulator<Traits>;
  using Shared = SharedStorage<Traits>;
  using Params = typename Traits::Params;
  __device__ __forceinline__ WideAccumulator(const Params& p, Shared& shared, uint32_t warpgroup)
      : Base(p, shared, warpgroup), warpgroup_(warpgroup) {}

  __device__ __forceinline__ void run() {
    while (true) {
      const uint32_t stage = ring_.stage();
      delay<Role::kStore>();
      ptx::wait(shared_.tile_full[stage], ring_.phase());
      const uint32_t flags = ptx::from_leader(shared_.tile[stage].flags);
      if (flags & Tile::kEnd) break;
      const bool adds = !(flags & Tile::kNothing);
      const uint32_t query_tile = ptx::from_leader(shared_.tile[stage].query.index);
      ptx::arrive_once(shared_.q_empty[stage]);
      if (adds) delay<Role::kStore>();
      if (adds && ptx::is_leader()) add(query_tile);
      __syncwarp();
      ring_.advance();
    }
    if (ptx::is_leader()) ptx::bulk_wait();
  }

 private:
  using Base::p_, Base::shared_;
  using Blocks = typename Base::Blocks;
  using First = DqShare<Traits, 0>;
  static constexpr int kBlockFloats = Blocks::kTileFloats / Blocks::kColumnBlocks;
  static_assert(kBlockFloats == 4 * Traits::kStagingFloats);

  /// Adds the consumer's blocks to the sums of query tile `index`.
  __device__ __forceinline__ void add(uint32_t index) {
    uint32_t* progress = p_.dq_sums.progress + index * Traits::kDqPieces + warpgroup_;
    const uint32_t seen = ptx::load_acquire(progress);
    wait_for_block();
    const bool first = Base::claim_first(progress, seen);
    float* to = p_.dq_sums.sums + static_cast<int64_t>(index) * Blocks::kTileFloats;
    const int begin = warpgroup_ == 0 ? 0 : First::kCount, end = warpgroup_ == 0 ? First::kCount : First::kBlocks;
    for (int block = begin; block < end; ++block) {
      if (block > begin) wait_for_block();
      this->template write<kBlockFloats>(to + block * kBlockFloats, shared_.staging.tile[warpgroup_],
                                         shared_.dq.empty[warpgroup_], first);
    }
    if (first) Base::publish(progress);
  }
  __device__ __forceinline__ void wait_for_block() {
    ptx::wait(shared_.dq.full[warpgroup_], block_phase_);
    block_phase_ ^= 1;
  }

  const uint32_t warpgroup_;  ///< the consumer's
  ptx::RingPosition<Traits::kStages> ring_;
  uint32_t block_phase_ = 0;
};

}  // namespace flashmask::sm90::bwd
