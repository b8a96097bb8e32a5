// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "flashmask/mask.h"
#include "flashmask/tiles.h"

namespace flashmask {

/// [0, length) cut at every multiple of `step` and, if `other_step` is not 0, of that too.
class Partition {
 public:
  Partition(int64_t length, int64_t step, int64_t other_step = 0);

  int64_t length() const { return cuts_.back(); }
  int64_t step() const { return step_; }
  int64_t parts() const { return static_cast<int64_t>(cuts_.size()) - 1; }
  int64_t begin(int64_t part) const { return cuts_[static_cast<std::size_t>(part)]; }
  int64_t end(int64_t part) const { return cuts_[static_cast<std::size_t>(part) + 1]; }
  int64_t size(int64_t part) const { return end(part) - begin(part); }
  /// The part that holds `position`.
  int64_t part_of(int64_t position) const {
    const int64_t cuts = position / step_;
    return other_step_ == 0 ? cuts : cuts + position / other_step_ - position / common_step_;
  }

 private:
  int64_t step_, other_step_, common_step_;
  std::vector<int64_t> cuts_;
};

/// Adds up row intervals: in how many of them lies each row of a part, summed over the part. One interval
/// costs the same whatever its length.
class RowCounter {
 public:
  explicit RowCounter(const Partition& rows);

  void add(int64_t begin, int64_t end) {
    add_from(begin, 1);
    add_from(end, -1);
  }
  /// `sign` times the interval from `row` to the end.
  void add_from(int64_t row, int64_t sign);

  /// The sums of all parts since the last call. The span is valid until the next one.
  std::span<const int64_t> take();

 private:
  const Partition& rows_;
  // For an interval from a row to the end: within_ has the rows in that row's part, onward_ +1 from the next part on.
  std::vector<int64_t> within_, onward_, counts_;
};

/// Throws unless the mask has this batch entry and head.
void check_entry(const MaskView& mask, int64_t batch, int64_t head);
/// Throws unless both sides are at least 1.
void check_tile(TileShape tile);

/// Cells of row_step x key_step elements of one batch entry and head. most_keys: of a longer sequence only as many keys
/// are counted, at equal distances and the last of all; 0 counts all.
struct Cells {
  int64_t batch = 0, head = 0;
  int64_t row_step = 1, key_step = 1;
  int64_t most_keys = 0;
};

/// Calls f(key cell, keys counted in it, visible elements of each of its row cells) for every column of cells,
/// ascending. Counts exactly, the block mask included; linear in the number of rows and keys, the number of
/// cells and the size of the block mask.
void for_each_visible_column(const MaskView& mask, const Cells& cells,
                             const std::function<void(int64_t, int64_t, std::span<const int64_t>)>& f);

/// Tiles [begin, end) of a column.
struct TileRun {
  int64_t begin, end;
};

/// One column of tiles: the longest runs of row tiles that are live / full, ascending. There are few of them, however
/// many tiles there are.
struct TileColumn {
  int64_t key_tile;
  std::span<const TileRun> live, full;
};

/// Calls f for every column of tiles, ascending. Linear in the keys and the runs; under a block mask or a band over
/// positions, in the tiles.
void for_each_tile_column(const MaskView& mask, int64_t batch, int64_t head, TileShape tile,
                          const std::function<void(const TileColumn&)>& f);

}  // namespace flashmask
