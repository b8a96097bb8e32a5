// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace flashmask::cuda {

/// A work tile is (batch entry, head, tile): a query tile in the forward, a key tile in the backward. Head indices
/// (batch entry x head) are dispatched in L2 groups, whose tensors the L2 cache holds while several work tiles read
/// them. Inside a group all heads' tiles of one rank come before the next rank's.
struct Schedule {
  uint32_t work_tiles, heads, heads_per_l2_group, tiles;
  uint32_t* next;  ///< counter of work tiles handed out
};

/// The n-th work tile in the order of dispatch; a batch entry has `heads` heads.
struct WorkTilePlace {
  uint32_t batch, head, rank;

#if defined(__CUDACC__)
  __device__ __forceinline__ WorkTilePlace(const Schedule& s, uint32_t heads, uint32_t n) {
    const uint32_t per_group = s.heads_per_l2_group * s.tiles;
    const uint32_t group = n / per_group, rest = n - group * per_group;
    const uint32_t first = group * s.heads_per_l2_group;
    const uint32_t in_group = min(s.heads_per_l2_group, s.heads - first);
    rank = rest / in_group;
    const uint32_t head_index = first + rest - rank * in_group;
    batch = head_index / heads;
    head = head_index - batch * heads;
  }
#endif
};

}  // namespace flashmask::cuda
