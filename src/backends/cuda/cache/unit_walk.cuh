// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/cache/cached_params.h"

namespace flashmask::cuda {

/// The units of a share, in order.
class UnitWalk {
 public:
  __device__ __forceinline__ void begin(const WorkPlan& plan, const Share& share) {
    tile_ = share.tile;
    tile_index_ = share.tile_index;
    head_ = share.kv_head;
    before_ = tile_.blocks_before;
    if (plan.mask_heads == 1) {
      before_ += int64_t{head_} * tile_.live_blocks;
    } else {
      for (int32_t h = 0; h < head_; ++h) before_ += plan.live[tile_.live_list + h];
    }
  }
  /// The n-th of units of `tiles` row tiles that are dealt whole.
  __device__ __forceinline__ void take(const WorkPlan& plan, int32_t tiles, int32_t n) {
    tile_index_ = dealt_tile(tiles, n, plan.heads_kv);
    tile_ = plan.tiles[tile_index_];
    head_ = n % plan.heads_kv;
  }
  __device__ __forceinline__ void next(const WorkPlan& plan) {
    before_ += live_blocks(plan);
    if (++head_ < plan.heads_kv) return;
    head_ = 0;
    tile_ = plan.tiles[++tile_index_];
  }

  __device__ __forceinline__ const RowTile& tile() const { return tile_; }
  __device__ __forceinline__ int32_t head() const { return head_; }
  __device__ __forceinline__ int32_t live_blocks(const WorkPlan& plan) const {
    return plan.mask_heads == 1 ? tile_.live_blocks : plan.live[tile_.live_list + head_];
  }
  /// A unit that is dealt whole.
  __device__ __forceinline__ UnitPart whole(const CachedParams& p) const {
    return {live_blocks(p.plan), head_, inside(p), 0, 0, 0, 0};
  }
  /// The unit's part of `blocks` in share n.
  __device__ __forceinline__ UnitPart part(const CachedParams& p, int32_t n, const Share& share, int32_t blocks) const {
    if (p.plan.invariant_blocks > 0) {
      const int32_t heads = p.plan.mask_heads == 1 ? p.plan.heads_kv : 1;
      return {blocks, head_, inside(p), tile_.parts, tile_.list * heads + head_, tile_.part, 0};
    }
    if (p.plan.is_forest())
      return {blocks, head_, inside(p), UnitPart::kMergedLater, 0, result_row(tile_, head_, n), 0};
    const int64_t all = share.all_blocks, shares = share.shares;
    const auto first_share = static_cast<int32_t>(share_of(before_, all, shares)),
               last_share = static_cast<int32_t>(share_of(before_ + live_blocks(p.plan) - 1, all, shares));
    const int32_t parts = first_share == last_share ? 0 : last_share - first_share + 1;
    return {blocks, head_, inside(p), parts, first_share, n == first_share ? p.plan.most_shares + n : n, 0};
  }

 private:
  /// The tile without rows that the call's tensors do not have: a plan may be stale, or know more rows than the call.
  __device__ __forceinline__ RowTile inside(const CachedParams& p) const {
    RowTile tile = tile_;
    const int64_t rows = p.call.rows - tile.rows_begin - tile.first_row;
    tile.row_count = static_cast<int32_t>(max(min(int64_t{tile.row_count}, rows), int64_t{0}));
    return tile;
  }

  RowTile tile_;
  int32_t tile_index_, head_;
  int64_t before_;  ///< blocks of the units before this one
};

}  // namespace flashmask::cuda
