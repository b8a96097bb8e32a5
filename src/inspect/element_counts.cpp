// SPDX-License-Identifier: Apache-2.0
#include "inspect/element_counts.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "common/arithmetic.h"
#include "common/message.h"
#include "mask/rules.h"
#include "mask/tile_classifier.h"
#include "mask/view.h"

namespace flashmask {
namespace {

/// For each part of `finer` the part of `coarser` it lies in.
std::vector<int64_t> parts_around(const Partition& finer, const Partition& coarser) {
  std::vector<int64_t> around(static_cast<std::size_t>(finer.parts()));
  for (std::size_t p = 0; p < around.size(); ++p) around[p] = coarser.part_of(finer.begin(static_cast<int64_t>(p)));
  return around;
}

/// Adds the rows that see one of the keys [begin, end), once for each key.
void add_visible_rows(const rules::Columns& columns, int64_t begin, int64_t end, RowCounter& counter) {
  counter.add_from(0, end - begin);
  for (int64_t j = begin; j < end; ++j) {
    rules::Interval hidden[4];
    const int n = rules::merge(rules::hidden_rows(columns, static_cast<int32_t>(j)), hidden);
    for (int k = 0; k < n; ++k) {
      counter.add_from(hidden[k].begin, -1);
      counter.add_from(hidden[k].end, 1);
    }
  }
}

/// The tile columns of a mask without a block mask; no grid is held.
void stream_tile_columns(const MaskView& view, int64_t batch, int64_t head, TileShape tile, const std::function<void(const TileColumn&)>& f) {
  TileClassifier classifier(view.seqlen_q, tile.rows);
  std::vector<uint64_t> live(static_cast<std::size_t>(classifier.words())), full(live.size());
  const rules::Columns column = columns(view, batch, head);
  const int64_t key_tiles = ceil_div(view.seqlen_k, tile.keys);
  for (int64_t c = 0; c < key_tiles; ++c) {
    classifier.classify(column, c * tile.keys, c + 1 < key_tiles ? (c + 1) * tile.keys : view.seqlen_k, live, full);
    f({c, live, full});
  }
}

/// The same of a grid that was classified as a whole.
void read_tile_columns(const TileGrid& grid, const std::function<void(const TileColumn&)>& f) {
  std::vector<uint64_t> live(static_cast<std::size_t>(ceil_div(grid.row_tiles, 64))), full(live.size());
  for (int64_t c = 0; c < grid.key_tiles; ++c) {
    std::fill(live.begin(), live.end(), 0);
    std::fill(full.begin(), full.end(), 0);
    for (int64_t r = 0; r < grid.row_tiles; ++r) {
      const TileClass tile = grid.at(r, c);
      live[static_cast<std::size_t>(r / 64)] |= uint64_t{tile != TileClass::kEmpty} << (r % 64);
      full[static_cast<std::size_t>(r / 64)] |= uint64_t{tile == TileClass::kFull} << (r % 64);
    }
    f({c, live, full});
  }
}

}  // namespace

Partition::Partition(int64_t length, int64_t step, int64_t other_step)
    : step_(step), other_step_(other_step), common_step_(other_step ? std::lcm(step, other_step) : 0) {
  for (int64_t at = 0; at < length;) {
    cuts_.push_back(at);
    const int64_t next = (at / step + 1) * step;
    at = other_step ? std::min(next, (at / other_step + 1) * other_step) : next;
  }
  cuts_.push_back(length);
}

RowCounter::RowCounter(const Partition& rows)
    : rows_(rows), within_(static_cast<std::size_t>(rows.parts())), onward_(within_.size() + 1), counts_(within_.size()) {}

void RowCounter::add_from(int64_t row, int64_t sign) {
  if (row >= rows_.length()) return;
  const int64_t part = rows_.part_of(row);
  within_[static_cast<std::size_t>(part)] += sign * (rows_.end(part) - row);
  onward_[static_cast<std::size_t>(part) + 1] += sign;
}

std::span<const int64_t> RowCounter::take() {
  int64_t whole = 0;
  for (std::size_t p = 0; p < counts_.size(); ++p) {
    whole += std::exchange(onward_[p], 0);
    counts_[p] = whole * rows_.size(static_cast<int64_t>(p)) + std::exchange(within_[p], 0);
  }
  onward_.back() = 0;
  return counts_;
}

void check_entry(const Mask& mask, int64_t batch, int64_t head) {
  if (batch >= 0 && batch < mask.batch() && head >= 0 && head < mask.heads()) return;
  throw_invalid("(batch ", batch, ", head ", head, ") is outside of the mask's [", mask.batch(), ", ", mask.heads(), "]");
}

void check_tile(TileShape tile) {
  if (tile.rows < 1 || tile.keys < 1) throw_invalid("tile is ", tile.rows, "x", tile.keys, "; both sides must be at least 1");
}

std::vector<int64_t> count_visible(const Mask& mask, int64_t batch, int64_t head, int64_t row_step, int64_t key_step) {
  const MaskView& view = mask.view();
  const uint8_t* keep = block_mask(view, batch, head);
  const Partition row_cells(view.seqlen_q, row_step), key_cells(view.seqlen_k, key_step);
  // Under a block mask, counted in parts that lie within one cell and one block.
  const int64_t block = keep ? kBlockMaskSize : 0;
  const Partition row_parts(view.seqlen_q, row_step, block), key_parts(view.seqlen_k, key_step, block);
  const std::vector<int64_t> row_cell = parts_around(row_parts, row_cells);
  const std::vector<int64_t> row_block = parts_around(row_parts, Partition(view.seqlen_q, kBlockMaskSize));
  const int64_t key_blocks = ceil_div(view.seqlen_k, kBlockMaskSize);

  std::vector<int64_t> counts(static_cast<std::size_t>(row_cells.parts() * key_cells.parts()));
  const rules::Columns column = columns(view, batch, head);
  RowCounter counter(row_parts);
  for (int64_t p = 0; p < key_parts.parts(); ++p) {
    add_visible_rows(column, key_parts.begin(p), key_parts.end(p), counter);
    const std::span<const int64_t> seen = counter.take();
    const int64_t key_cell = key_cells.part_of(key_parts.begin(p)), key_block = key_parts.begin(p) / kBlockMaskSize;
    for (std::size_t r = 0; r < seen.size(); ++r) {
      if (keep && !keep[row_block[r] * key_blocks + key_block]) continue;
      counts[static_cast<std::size_t>(row_cell[r] * key_cells.parts() + key_cell)] += seen[r];
    }
  }
  return counts;
}

void for_each_tile_column(const Mask& mask, int64_t batch, int64_t head, TileShape tile, const std::function<void(const TileColumn&)>& f) {
  if (mask.has_block_mask()) {
    read_tile_columns(classify_tiles(mask, batch, head, tile), f);
  } else {
    stream_tile_columns(mask.view(), batch, head, tile, f);
  }
}

}  // namespace flashmask
