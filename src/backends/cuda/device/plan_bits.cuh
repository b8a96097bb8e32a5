// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "plan/runs.h"

namespace flashmask::cuda {

/// The plan's number of the mask that (batch entry, query head) reads. `PlanBits` is a kernel's view of the plan.
template <typename PlanBits>
__host__ __device__ __forceinline__ uint32_t mask_index(const PlanBits& plan, uint32_t batch, uint32_t head) {
  return batch / plan.sharing.batch_entries * plan.mask_heads + head / plan.sharing.heads;
}

/// Calls f(read), where read(granules, line, words, word) is word number `word` of the granules of a line, which is a
/// row granule or key block of all masks and has `words`. What f reads has one branch on the plan's form for all of it,
/// so that loads are under way together.
template <typename PlanBits, typename F>
__device__ __forceinline__ void read_granules(const PlanBits& plan, F&& f) {
  if (plan.in_runs) {
    f([](const uint32_t* granules, int64_t line, int32_t, int32_t word) {
      return runs_word<uint32_t>(reinterpret_cast<const GranuleRun*>(granules) + line * kLineRuns, word * 32);
    });
  } else {
    f([](const uint32_t* granules, int64_t line, int32_t words, int32_t word) {
      return __ldg(granules + line * words + word);
    });
  }
}

/// One word, as read_granules reads it.
template <typename PlanBits>
__device__ __forceinline__ uint32_t granule_word(const PlanBits& plan, const uint32_t* granules, int64_t line,
                                                 int32_t words, int32_t word) {
  uint32_t result;
  read_granules(plan, [&](const auto& read) { result = read(granules, line, words, word); });
  return result;
}

/// How many of the first `key_tiles` key tiles see rows of a query tile of `mask`. All lanes of a warp call it.
template <int kGranules, typename PlanBits>
__device__ __forceinline__ uint32_t live_key_tiles(const PlanBits& plan, uint32_t mask, int32_t row_tile,
                                                   uint32_t key_tiles) {
  const int32_t granule = row_tile * kGranules;
  const bool pair = kGranules == 2 && granule + 1 < plan.row_granules;
  const int64_t line = static_cast<int64_t>(mask) * plan.row_granules + granule;
  uint32_t count = 0;
  for (uint32_t word = threadIdx.x % 32; word * 32 < key_tiles; word += 32) {
    const auto at = static_cast<int32_t>(word);
    uint32_t bits = granule_word(plan, plan.row_live, line, plan.words_per_row, at);
    if (pair) bits |= granule_word(plan, plan.row_live, line + 1, plan.words_per_row, at);
    if (key_tiles - word * 32 < 32) bits &= (1u << (key_tiles - word * 32)) - 1;
    count += __popc(bits);
  }
  return __reduce_add_sync(0xffffffff, count);
}

}  // namespace flashmask::cuda
