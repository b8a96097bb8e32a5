// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/attention/plan_bits.cuh"
#include "backends/cuda/ptx/barrier.cuh"
#include "backends/cuda/sm80/backward/live_row_tiles.cuh"
#include "backends/cuda/sm80/backward/params.h"

namespace flashmask::sm80::bwd {

/// How many of the first `key_tiles` key tiles add to a row tile's dq, whose own key tile is the last of them.
template <typename Traits, typename Params>
__device__ __forceinline__ uint32_t contributing_key_tiles(const Params& p, uint32_t mask, int32_t row_tile,
                                                           uint32_t key_tiles) {
  constexpr uint32_t kOfBlock = Traits::kTilesOfBlock;
  const uint32_t blocks = (key_tiles + kOfBlock - 1) / kOfBlock;
  return kOfBlock * cuda::live_key_tiles<Traits::kGranules>(p.plan, mask, row_tile / Traits::kTilesOfGranule, blocks) -
         (blocks * kOfBlock - key_tiles);
}

/// A CTA's turns at dq's sums in deterministic mode, in which key tiles add from the last to the first. All threads
/// call the functions; two warps act, each while the others of its scheduler go on with their products: the last one
/// finds out whose turn it is, the first one passes it on.
template <typename Traits>
struct Turn {
  const BackwardParams& p;
  HeldTurn& held;

  /// Counts the key tiles that add to the row tile after those before `key_tile`; between two calls lies a barrier.
  __device__ __forceinline__ void look_up(uint32_t batch, int32_t key_tile, const RowTile& tile) const {
    if (!p.dq.deterministic || threadIdx.x < kFirstOfLastWarp) return;
    const auto key_tiles = static_cast<uint32_t>(key_tile) + 1;
    const uint32_t number = p.dense.given ? key_tiles
                                          : contributing_key_tiles<Traits>(
                                                p, cuda::mask_index(p.plan, batch, tile.head), tile.index, key_tiles);
    if (threadIdx.x == kFirstOfLastWarp) held.number = number;
  }
  /// The last warp returns when all key tiles before have added to the row tile that was looked up, number `index` of
  /// all.
  __device__ __forceinline__ void wait(int64_t index) const {
    if (!p.dq.deterministic || threadIdx.x != kFirstOfLastWarp) return;
    uint32_t* const of_tile = p.dq.state + index;
    while ((ptx::load_acquire(of_tile) & TurnState::kPending) != held.number) {
    }
    held.taken = of_tile;
  }
  /// After wait(): the turn is every warp's.
  __device__ __forceinline__ void share() const {
    if (p.dq.deterministic) __syncthreads();
  }
  /// After a barrier that follows the additions: lets the next key tile add.
  __device__ __forceinline__ void pass() const {
    if (!p.dq.deterministic || threadIdx.x != 0 || !held.taken) return;
    ptx::add_release(held.taken, ~0u);
    held.taken = nullptr;
  }

 private:
  static constexpr uint32_t kFirstOfLastWarp = Traits::kThreads - 32;
};

}  // namespace flashmask::sm80::bwd
