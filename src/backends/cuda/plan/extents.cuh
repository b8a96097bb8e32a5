// SPDX-License-Identifier: Apache-2.0
#pragma once

// The last kernel of the planner: how far the visible elements of each batch entry reach.

#include <cstdint>

#include "backends/cuda/plan/params.cuh"
#include "mask/rules.h"

namespace flashmask::cuda::plan {

inline constexpr int kExtentThreads = 256;
inline constexpr int kExtentKeys = 1024;  // keys of a block

/// The positions of batch entry `b`, none of a mask without.
__device__ inline rules::PositionBand positions_of(const Params& p, const PositionBand& band, int32_t b) {
  if (!p.mask.q_pos) return {};
  return {band.lo, band.hi, p.mask.q_pos + b / band.q_group * p.mask.seqlen_q,
          p.mask.k_pos + b / band.k_group * p.mask.seqlen_k};
}

/// Extends the zeroed `extents` by what rows see of their keys: a block for every 1024 keys of every mask.
template <PlanForm kForm>
__device__ __forceinline__ void extents(const Params& p, const PositionBand& band, int32_t blocks_per_mask,
                                        VisibleExtent* extents) {
  wait_for_previous();
  const auto index = static_cast<int32_t>(blockIdx.x);
  const int32_t m = index / blocks_per_mask, b = m / p.heads, first = index % blocks_per_mask * kExtentKeys;
  const rules::Columns columns = own_columns(p.mask, own_of(p, m, p.bounds).index);
  const rules::PositionBand positions = positions_of(p, band, b);
  const auto end = static_cast<int32_t>(min(int64_t{first} + kExtentKeys, p.mask.seqlen_k));
  int32_t rows = 0, keys = 0;
  for (int32_t key = first + static_cast<int32_t>(threadIdx.x); key < end; key += kExtentThreads) {
    const int64_t key_block = int64_t{m} * p.key_blocks + key / static_cast<int32_t>(kGranuleKeys);
    const auto is_live = [&](int32_t granule) {
      return (key_block_word<kForm>(p, p.layout.key_live, key_block, granule / 32) >> granule % 32 & 1) != 0;
    };
    const int32_t row = rules::last_visible_row<static_cast<int32_t>(kGranuleRows)>(columns, positions, key, is_live);
    if (row < 0) continue;
    rows = max(rows, row + 1);
    keys = key + 1;
  }
  rows = __reduce_max_sync(0xffffffff, rows);
  keys = __reduce_max_sync(0xffffffff, keys);
  if (threadIdx.x % 32 != 0 || keys == 0) return;
  atomicMax(&extents[b].rows, rows);
  atomicMax(&extents[b].keys, keys);
}

}  // namespace flashmask::cuda::plan
