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
/// call the functions, and the first one acts. `taken` is in shared memory: the state of the row tile whose turn the
/// CTA has, or null; a barrier lies between a call of wait() and one of pass().
template <typename Traits>
struct Turn {
  const BackwardParams& p;
  uint32_t*& taken;

  /// Returns when all key tiles before `key_tile` have added to the row tile, number `index` of all.
  __device__ __forceinline__ void wait(uint32_t batch, int32_t key_tile, const RowTile& tile, int64_t index) const {
    if (!p.dq.deterministic) return;
    if (threadIdx.x < 32) {
      const auto key_tiles = static_cast<uint32_t>(key_tile) + 1;
      const uint32_t turn = p.dense.given ? key_tiles
                                          : contributing_key_tiles<Traits>(
                                                p, cuda::mask_index(p.plan, batch, tile.head), tile.index, key_tiles);
      if (threadIdx.x == 0) {
        uint32_t* const state = p.dq.state + index;
        while ((ptx::load_acquire(state) & TurnState::kPending) != turn) {
        }
        taken = state;
      }
    }
    __syncthreads();
  }
  /// After a barrier that follows the additions: lets the next key tile add.
  __device__ __forceinline__ void pass() const {
    if (!p.dq.deterministic || threadIdx.x != 0 || !taken) return;
    ptx::add_release(taken, ~0u);
    taken = nullptr;
  }
};

}  // namespace flashmask::sm80::bwd
