// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/cache/work.h"
#include "call/sequence_view.h"

namespace flashmask::cuda {

/// Places of row tiles that follow from a request's rows alone, so that nothing has to be added up before: the tiles of
/// request b have the slots from first() on. Packed rows leave slots empty.
struct TileSlots {
  const WorkPlan& plan;
  const CachedView& call;

  __device__ __forceinline__ int64_t first(int64_t b, int64_t rows_begin) const {
    if (!call.is_packed) return b * count(call.rows);
    return plan.head_parts > 1 ? rows_begin * plan.head_parts : quotient(rows_begin, plan.rows_of_tile) + b;
  }
  /// Tiles of a request of some rows.
  __device__ __forceinline__ int64_t count(int64_t rows) const {
    if (plan.head_parts > 1) return rows * plan.head_parts;
    return quotient(rows + plan.rows_of_tile - 1, plan.rows_of_tile);
  }
  /// The rows and heads of a request's t-th tile.
  __device__ __forceinline__ void place(int64_t t, int64_t rows, RowTile& tile) const {
    const int64_t row = plan.head_parts > 1 ? quotient(t, plan.head_parts) : t * plan.rows_of_tile;
    tile.first_row = static_cast<int32_t>(row);
    tile.row_count = static_cast<int32_t>(min(int64_t{plan.rows_of_tile}, rows - row));
    tile.first_head = plan.head_parts > 1 ? static_cast<int32_t>(t % plan.head_parts) * plan.packed_rows : 0;
    tile.head_count = min(plan.group - tile.first_head, plan.packed_rows);
  }
  /// The rows and heads of a slot's tile in a forest of so many rows, whose level this returns; a row_count of 0 or
  /// less: no rows are there.
  __device__ __forceinline__ const TileLevel& place_in_level(int32_t slot, int64_t rows, RowTile& tile) const {
    const int n = slot >= plan.levels[2].first_slot ? 2 : slot >= plan.levels[1].first_slot ? 1 : 0;
    const TileLevel& level = plan.levels[n];
    tile.first_row = (slot - level.first_slot) * level.rows;
    tile.row_count = static_cast<int32_t>(min(int64_t{level.rows}, rows - tile.first_row));
    tile.first_head = 0;
    tile.head_count = plan.group;
    return level;
  }
};

}  // namespace flashmask::cuda
