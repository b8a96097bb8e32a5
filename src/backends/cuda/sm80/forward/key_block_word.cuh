// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/device/mask_params.h"
#include "backends/cuda/device/plan_bits.cuh"
#include "backends/cuda/ptx/registers.cuh"

namespace flashmask::sm80 {

/// One word of a plan's bits of kGranules row granules: 32 key blocks of 128 keys. All lanes of a warp hold the same.
template <int kGranules>
struct KeyBlockWord {
  static constexpr uint32_t kLive = 1, kFull = 2;
  static constexpr int kBits = 2;  ///< bits of a granule in a block's classes
  uint32_t live[kGranules] = {}, full[kGranules] = {};
  uint32_t any = 0;  ///< blocks that some granule sees

  /// Goes on to the first word from `word` on with a block that a row of the granules from `granule` on sees; false if
  /// there is none. All lanes of a warp call it.
  __device__ __forceinline__ bool find(const cuda::RowPlanBits& plan, uint32_t mask, int32_t granule, int32_t& word) {
    const int64_t line = static_cast<int64_t>(mask) * plan.row_granules + granule;
    for (; word < plan.words_per_row; word += 32) {
      read(plan, line, min(kGranules, plan.row_granules - granule), word + static_cast<int32_t>(ptx::lane()));
      const uint32_t found = __ballot_sync(0xffffffff, any != 0);
      if (found == 0) continue;
      const int lane = __ffs(static_cast<int>(found)) - 1;
      broadcast_from(lane);
      word += lane;
      return true;
    }
    return false;
  }

  /// Marks all blocks of a word live and none full, where there is no plan; false past the last block.
  __device__ __forceinline__ bool mark_all_live(int32_t word, int32_t key_blocks) {
    const int32_t count = key_blocks - word * 32;
    if (count <= 0) return false;
    any = count < 32 ? (1u << count) - 1 : ~0u;
#pragma unroll
    for (uint32_t& of_granule : live) of_granule = any;
    return true;
  }

  /// A block's kLive and kFull, kBits for each granule; none is full if the block is not whole.
  __device__ __forceinline__ uint32_t classes(uint32_t block, bool is_whole) const {
    uint32_t classes = 0;
#pragma unroll
    for (int g = 0; g < kGranules; ++g)
      classes |= ((live[g] >> block & 1) * kLive | (full[g] >> block & is_whole) * kFull) << kBits * g;
    return classes;
  }

 private:
  /// The calling lane's word.
  __device__ __forceinline__ void read(const cuda::RowPlanBits& plan, int64_t line, int32_t granules, int32_t word) {
    any = 0;
    cuda::read_granules(plan, [&](const auto& read_word) {
#pragma unroll
      for (int g = 0; g < kGranules; ++g) {
        const bool inside = g < granules && word < plan.words_per_row;
        live[g] = inside ? read_word(plan.row_live, line + g, plan.words_per_row, word) : 0;
        full[g] = inside ? read_word(plan.row_full, line + g, plan.words_per_row, word) : 0;
        any |= live[g];
      }
    });
  }
  __device__ __forceinline__ void broadcast_from(int lane) {
    any = __shfl_sync(0xffffffff, any, lane);
#pragma unroll
    for (int g = 0; g < kGranules; ++g) {
      live[g] = __shfl_sync(0xffffffff, live[g], lane);
      full[g] = __shfl_sync(0xffffffff, full[g], lane);
    }
  }
};

}  // namespace flashmask::sm80
