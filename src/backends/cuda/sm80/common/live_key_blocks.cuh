// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <climits>
#include <cstdint>

#include "backends/cuda/device/mask_params.h"
#include "backends/cuda/ptx/registers.cuh"
#include "flashmask/granule_run.h"

namespace flashmask::sm80 {

/// A key block of 128 keys; of one that a row tile sees, bits for each of its row granules.
struct KeyBlock {
  static constexpr uint32_t kLive = 1, kFull = 2;
  static constexpr int kBits = 2;
  int32_t index;
  uint32_t classes;  ///< kBits of each granule; in uniform registers, like the index
};

/// The calling lane's run of a row granule's, of those live or full; empty past the last.
__device__ __forceinline__ GranuleRun lane_run(const uint32_t* runs, int64_t line) {
  if (ptx::lane() >= kLineRuns) return {};
  const int2 run = __ldg(reinterpret_cast<const int2*>(runs) + line * kLineRuns + ptx::lane());
  return {run.x, run.y};
}

/// next_live_block of a plan in runs, a run to each lane: words of them would take registers that kernels do not have.
template <int kGranules>
__device__ __forceinline__ bool next_run_block(const cuda::RowPlanBits& plan, int64_t row, int32_t granules,
                                               KeyBlock& block) {
  int32_t next = INT_MAX;
#pragma unroll
  for (int g = 0; g < kGranules; ++g) {
    if (g >= granules) continue;
    const GranuleRun run = lane_run(plan.row_live, row + g);
    if (run.end > block.index + 1) next = min(next, max(run.begin, block.index + 1));
  }
  next = __reduce_min_sync(0xffffffff, next);
  if (next == INT_MAX) return false;
  block.index = next;
  uint32_t classes = 0;
#pragma unroll
  for (int g = 0; g < kGranules; ++g) {
    if (g >= granules) continue;
    const auto bit = [&](const uint32_t* runs, uint32_t of_class) {
      const GranuleRun run = lane_run(runs, row + g);
      return run.begin <= next && next < run.end ? of_class << KeyBlock::kBits * g : 0;
    };
    classes |= bit(plan.row_live, KeyBlock::kLive) | bit(plan.row_full, KeyBlock::kFull);
  }
  block.classes = ptx::uniform(classes);
  return true;
}

/// Goes on to the next block after `block.index` that a row of the kGranules row granules from `granule` on sees; false
/// if there is none. All lanes of a warp call it, and all warps of a CTA find the same block. Nothing is kept between
/// calls, as kernels have no registers for it: the bits are in the L1 cache.
template <int kGranules>
__device__ __forceinline__ bool next_live_block(const cuda::RowPlanBits& plan, uint32_t mask, int32_t granule,
                                                KeyBlock& block) {
  const int64_t row = static_cast<int64_t>(mask) * plan.row_granules + granule;
  const int32_t granules = min(kGranules, plan.row_granules - granule), first = block.index + 1;
  if (plan.in_runs) return next_run_block<kGranules>(plan, row, granules, block);
  for (int32_t begin = first / 32; begin < plan.words_per_row; begin += 32) {
    const int32_t word = begin + static_cast<int32_t>(ptx::lane());
    uint32_t live[kGranules] = {}, full[kGranules] = {}, any = 0;
#pragma unroll
    for (int g = 0; g < kGranules; ++g) {
      if (g < granules && word < plan.words_per_row) {
        const int64_t at = row * plan.words_per_row + static_cast<int64_t>(g) * plan.words_per_row + word;
        live[g] = __ldg(plan.row_live + at);
        full[g] = __ldg(plan.row_full + at);
      }
      any |= live[g];
    }
    if (word == first / 32) any &= ~0u << first % 32;
    const uint32_t found = __ballot_sync(0xffffffff, any != 0);
    if (found == 0) continue;
    const int lane = __ffs(static_cast<int>(found)) - 1;
    const uint32_t first_bits = ptx::uniform(static_cast<int>(ptx::lane()) == lane ? any : 0);
    const int bit = __ffs(static_cast<int>(first_bits)) - 1;
    uint32_t classes = 0;
#pragma unroll
    for (int g = 0; g < kGranules; ++g) {
      const uint32_t own = (live[g] >> bit & 1) * KeyBlock::kLive | (full[g] >> bit & 1) * KeyBlock::kFull;
      classes |= own << KeyBlock::kBits * g;
    }
    block.index = static_cast<int32_t>(ptx::uniform(static_cast<uint32_t>((begin + lane) * 32 + bit)));
    block.classes = ptx::uniform(static_cast<int>(ptx::lane()) == lane ? classes : 0);
    return true;
  }
  return false;
}

}  // namespace flashmask::sm80
