// SPDX-License-Identifier: Apache-2.0
#include "inspect/element_counts.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "common/arithmetic.h"
#include "common/message.h"
#include "mask/host_only.h"
#include "mask/rules.h"
#include "mask/tile_classifier.h"
#include "mask/view.h"

namespace flashmask {
namespace {

/// For each part of `finer` the part of `coarser` it lies in.
std::vector<std::size_t> parts_around(const Partition& finer, const Partition& coarser) {
  std::vector<std::size_t> around(static_cast<std::size_t>(finer.parts()));
  for (std::size_t p = 0; p < around.size(); ++p)
    around[p] = static_cast<std::size_t>(coarser.part_of(finer.begin(static_cast<int64_t>(p))));
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

/// A block mask packed into words of 64 row blocks, so that it can be read column by column.
class KeptBlocks {
 public:
  KeptBlocks(const MaskView& view, int64_t batch, int64_t head)
      : key_blocks_(static_cast<std::size_t>(ceil_div(view.seqlen_k, kBlockMaskSize))),
        column_(static_cast<std::size_t>(ceil_div(ceil_div(view.seqlen_q, kBlockMaskSize), 64)), ~uint64_t{0}) {
    const uint8_t* keep = block_mask(view, batch, head);
    if (!keep) return;
    words_.resize(column_.size() * key_blocks_);
    for (int64_t r = 0; r < ceil_div(view.seqlen_q, kBlockMaskSize); ++r, keep += key_blocks_) {
      uint64_t* words = words_.data() + static_cast<std::size_t>(r / 64) * key_blocks_;
      for (std::size_t c = 0; c < key_blocks_; ++c) words[c] |= uint64_t{keep[c] != 0} << (r % 64);
    }
  }

  bool all() const { return words_.empty(); }

  /// Bit r % 64 of word r / 64: block r of this column is kept. Valid until the next call.
  std::span<const uint64_t> column(int64_t key_block) {
    for (std::size_t w = 0; w < column_.size() && !all(); ++w)
      column_[w] = words_[w * key_blocks_ + static_cast<std::size_t>(key_block)];
    return column_;
  }

 private:
  std::size_t key_blocks_;
  std::vector<uint64_t> words_, column_;
};

void set_bit(std::vector<uint64_t>& words, std::size_t bit, bool value) {
  words[bit / 64] |= uint64_t{value} << (bit % 64);
}

/// The tile columns of a mask without a block mask: the library's own classification.
void classify_columns(const MaskView& view, int64_t batch, int64_t head, TileShape tile,
                      const std::function<void(const TileColumn&)>& f) {
  TileClassifier classifier(view.seqlen_q, tile.rows);
  std::vector<uint64_t> live(static_cast<std::size_t>(classifier.words())), full(live.size());
  const rules::Columns column = columns(view, batch, head);
  const int64_t key_tiles = ceil_div(view.seqlen_k, tile.keys);
  for (int64_t c = 0; c < key_tiles; ++c) {
    classifier.classify(column, c * tile.keys, c + 1 < key_tiles ? (c + 1) * tile.keys : view.seqlen_k, live, full);
    f({c, live, full});
  }
}

/// The same under a block mask, whose blocks need not line up with the tiles: from the visible elements of every tile.
void count_columns(const Mask& mask, int64_t batch, int64_t head, TileShape tile,
                   const std::function<void(const TileColumn&)>& f) {
  // A tile beyond the end is as good as one that ends there, and its side multiplies without overflow.
  tile = {.rows = std::min(tile.rows, std::max<int64_t>(mask.seqlen_q(), 1)),
          .keys = std::min(tile.keys, std::max<int64_t>(mask.seqlen_k(), 1))};
  const Partition rows(mask.seqlen_q(), tile.rows), keys(mask.seqlen_k(), tile.keys);
  std::vector<uint64_t> live(static_cast<std::size_t>(ceil_div(rows.parts(), 64))), full(live.size());
  for_each_visible_column(mask, batch, head, tile.rows, tile.keys, [&](int64_t c, std::span<const int64_t> visible) {
    std::fill(live.begin(), live.end(), 0);
    std::fill(full.begin(), full.end(), 0);
    for (std::size_t r = 0; r < visible.size(); ++r) {
      set_bit(live, r, visible[r] > 0);
      set_bit(full, r, visible[r] == rows.size(static_cast<int64_t>(r)) * keys.size(c));
    }
    f({c, live, full});
  });
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
    : rows_(rows),
      within_(static_cast<std::size_t>(rows.parts())),
      onward_(within_.size() + 1),
      counts_(within_.size()) {}

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
  throw_invalid("(batch ", batch, ", head ", head, ") is outside of the mask's [", mask.batch(), ", ", mask.heads(),
                "]");
}

void check_tile(TileShape tile) {
  if (tile.rows < 1 || tile.keys < 1)
    throw_invalid("tile is ", tile.rows, "x", tile.keys, "; both sides must be at least 1");
}

void for_each_visible_column(const Mask& mask, int64_t batch, int64_t head, int64_t row_step, int64_t key_step,
                             const std::function<void(int64_t, std::span<const int64_t>)>& f) {
  const MaskView& view = mask.view();
  require_host(view, "the count of visible elements");
  KeptBlocks blocks(view, batch, head);
  const Partition row_cells(view.seqlen_q, row_step), key_cells(view.seqlen_k, key_step);
  // Under a block mask, counted in parts that lie within one cell and one block.
  const int64_t block = blocks.all() ? 0 : kBlockMaskSize;
  const Partition row_parts(view.seqlen_q, row_step, block), key_parts(view.seqlen_k, key_step, block);
  const std::vector<std::size_t> row_cell = parts_around(row_parts, row_cells),
                                 row_block = parts_around(row_parts, Partition(view.seqlen_q, kBlockMaskSize));
  const rules::Columns column = columns(view, batch, head);
  RowCounter counter(row_parts);
  std::vector<int64_t> visible(static_cast<std::size_t>(row_cells.parts()));
  for (int64_t p = 0; p < key_parts.parts(); ++p) {
    add_visible_rows(column, key_parts.begin(p), key_parts.end(p), counter);
    const std::span<const int64_t> seen = counter.take();
    const std::span<const uint64_t> kept = blocks.column(key_parts.begin(p) / kBlockMaskSize);
    for (std::size_t r = 0; r < seen.size(); ++r) {
      const auto is_kept = static_cast<int64_t>(kept[row_block[r] / 64] >> (row_block[r] % 64) & 1);
      visible[row_cell[r]] += is_kept * seen[r];  // a branch would be mispredicted in a random block mask
    }
    const int64_t key_cell = key_cells.part_of(key_parts.begin(p));
    if (key_parts.end(p) != key_cells.end(key_cell)) continue;
    f(key_cell, visible);
    std::fill(visible.begin(), visible.end(), 0);
  }
}

void for_each_tile_column(const Mask& mask, int64_t batch, int64_t head, TileShape tile,
                          const std::function<void(const TileColumn&)>& f) {
  require_host(mask.view(), "the count of tiles");
  if (mask.has_block_mask()) {
    count_columns(mask, batch, head, tile, f);
  } else {
    classify_columns(mask.view(), batch, head, tile, f);
  }
}

}  // namespace flashmask
