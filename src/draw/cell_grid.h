// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "flashmask/draw.h"
#include "flashmask/inspect.h"
#include "inspect/element_counts.h"

namespace flashmask {

/// Contents of one cell of a drawing, in elements.
struct Cell {
  int64_t elements = 0;
  int64_t visible = 0;
  int64_t in_full_tiles = 0;     ///< all of them visible
  int64_t in_partial_tiles = 0;  ///< some of them visible; the rest of the cell lies in skipped tiles
};

/// One batch entry and head of a mask in at most `max_cells` cells a side, from which every drawing is made. All counts
/// are exact. Linear in the lengths, the tiles, the cells and the size of the block mask.
class CellGrid {
 public:
  CellGrid(const Mask& mask, const DrawOptions& options, int64_t max_cells);

  /// The query rows and the keys, cut into cells.
  const Partition& rows() const { return rows_; }
  const Partition& keys() const { return keys_; }
  bool empty() const { return cells_.empty(); }
  /// True if a cell is one element.
  bool shows_elements() const { return rows_.step() == 1 && keys_.step() == 1; }
  const Cell& at(int64_t row_cell, int64_t key_cell) const {
    return cells_[static_cast<std::size_t>(row_cell * keys_.parts() + key_cell)];
  }

  /// Statistics of the batch entry and head that is drawn, not of all.
  const MaskStatistics& statistics() const { return statistics_; }

 private:
  void count_elements(const Mask& mask, const DrawOptions& options);
  void count_tiles(const Mask& mask, const DrawOptions& options);
  /// Adds the tiles of one column to the cells that it crosses.
  void add_tile_column(const TileColumn& column, RowCounter& counter);

  Partition rows_, keys_;
  std::vector<Cell> cells_;
  MaskStatistics statistics_;
};

/// options.max_cells, or `otherwise` if it is 0; throws if it is out of range. Checks the other options too.
int64_t checked_max_cells(const Mask& mask, const DrawOptions& options, int64_t otherwise);

}  // namespace flashmask
