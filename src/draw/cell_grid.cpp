// SPDX-License-Identifier: Apache-2.0
#include "draw/cell_grid.h"

#include <algorithm>

#include "common/arithmetic.h"
#include "common/message.h"

namespace flashmask {
namespace {

constexpr int64_t kMostCells = 4096;
/// The shorter side of a drawing has at least this part of the cells it may have, however long the other is.
constexpr int64_t kFlattest = 8;

/// How many cells a side of `length` elements may have when the other has `other`: in proportion.
int64_t side_cells(int64_t length, int64_t other, int64_t max_cells) {
  if (length >= other) return max_cells;
  return std::max({ceil_div(max_cells * length, other), max_cells / kFlattest, int64_t{1}});
}

/// Elements of a cell: the fewest that need no more than `cells` cells, rounded up to whole cells per tile
/// or whole tiles per cell unless that costs half of the cells.
int64_t cell_step(int64_t length, int64_t cells, int64_t tile) {
  const int64_t fewest = std::max<int64_t>(ceil_div(length, cells), 1);
  if (fewest > tile) {
    const int64_t step = round_up(fewest, tile);
    return step < 2 * fewest ? step : fewest;
  }
  for (int64_t step = fewest; step < 2 * fewest; ++step) {
    if (tile % step == 0) return step;
  }
  return fewest;
}

Partition cells_of(int64_t length, int64_t other, int64_t max_cells, int64_t tile) {
  return Partition(length, cell_step(length, side_cells(length, other, max_cells), tile));
}

}  // namespace

CellGrid::CellGrid(const Mask& mask, const DrawOptions& options, int64_t max_cells)
    : rows_(cells_of(mask.seqlen_q(), mask.seqlen_k(), max_cells, options.tile.rows)),
      keys_(cells_of(mask.seqlen_k(), mask.seqlen_q(), max_cells, options.tile.keys)) {
  count_elements(mask, options);
  count_tiles(mask, options);
}

void CellGrid::count_elements(const Mask& mask, const DrawOptions& options) {
  cells_.resize(static_cast<std::size_t>(rows_.parts() * keys_.parts()));
  for_each_visible_column(
      mask.view(), {.batch = options.batch, .head = options.head, .row_step = rows_.step(), .key_step = keys_.step()},
      [this](int64_t k, int64_t, std::span<const int64_t> visible) {
        for (int64_t r = 0; r < rows_.parts(); ++r) {
          Cell& cell = cells_[static_cast<std::size_t>(r * keys_.parts() + k)];
          cell.elements = rows_.size(r) * keys_.size(k);
          cell.visible = visible[static_cast<std::size_t>(r)];
          statistics_.elements += cell.elements;
          statistics_.visible += cell.visible;
        }
      });
}

void CellGrid::count_tiles(const Mask& mask, const DrawOptions& options) {
  statistics_.tile = options.tile;
  statistics_.tiles = ceil_div(mask.seqlen_q(), options.tile.rows) * ceil_div(mask.seqlen_k(), options.tile.keys);
  if (cells_.empty()) return;
  RowCounter counter(rows_);
  for_each_tile_column(mask.view(), options.batch, options.head, options.tile,
                       [&](const TileColumn& column) { add_tile_column(column, counter); });
}

void CellGrid::add_tile_column(const TileColumn& column, RowCounter& counter) {
  const TileShape tile = statistics_.tile;
  const auto count_rows = [&](std::span<const TileRun> runs, int64_t& tile_count) {
    for (const auto& [begin, end] : runs) {
      tile_count += end - begin;
      counter.add(begin * tile.rows, end >= ceil_div(rows_.length(), tile.rows) ? rows_.length() : end * tile.rows);
    }
    return counter.take();
  };
  int64_t live_tiles = 0, full_tiles = 0;
  const auto live_span = count_rows(column.live, live_tiles);
  const std::vector<int64_t> live(live_span.begin(), live_span.end());
  const std::span<const int64_t> full = count_rows(column.full, full_tiles);
  statistics_.full_tiles += full_tiles;
  statistics_.partial_tiles += live_tiles - full_tiles;
  if (live_tiles == 0) return;

  const int64_t begin = column.key_tile * tile.keys, end = begin + std::min(tile.keys, keys_.length() - begin);
  for (int64_t k = keys_.part_of(begin); k < keys_.parts() && keys_.begin(k) < end; ++k) {
    const int64_t keys = std::min(end, keys_.end(k)) - std::max(begin, keys_.begin(k));
    for (std::size_t r = 0; r < live.size(); ++r) {
      Cell& cell = cells_[r * static_cast<std::size_t>(keys_.parts()) + static_cast<std::size_t>(k)];
      cell.in_full_tiles += full[r] * keys;
      cell.in_partial_tiles += (live[r] - full[r]) * keys;
    }
  }
}

int64_t checked_max_cells(const Mask& mask, const DrawOptions& options, int64_t otherwise) {
  check_entry(mask.view(), options.batch, options.head);
  check_tile(options.tile);
  if (options.max_cells < 0 || options.max_cells > kMostCells) {
    throw_invalid("max_cells is ", options.max_cells, "; it must be between 0 (the default) and ", kMostCells);
  }
  return options.max_cells == 0 ? otherwise : options.max_cells;
}

}  // namespace flashmask
