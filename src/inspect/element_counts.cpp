// SPDX-License-Identifier: Apache-2.0
#include "inspect/element_counts.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include "common/arithmetic.h"
#include "common/message.h"
#include "mask/host_only.h"
#include "mask/position_rows.h"
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

/// Takes away the rows that a key is hidden from.
class HiddenRowTaker {
 public:
  HiddenRowTaker(const MaskView& mask, int64_t batch, int64_t head)
      : rows_(column_rows(mask, batch, head)),
        has_positions_(compares_positions(mask)),
        positions_(position_band(mask, batch), mask.seqlen_q) {}

  void take(int64_t key, RowCounter& counter) {
    if (has_positions_) return subtract_union(key, counter);
    rows_.for_each_hidden(static_cast<int32_t>(key), [&counter](rules::Interval hidden) { take(hidden, counter); });
  }

 private:
  static void take(rules::Interval rows, RowCounter& counter) {
    counter.add_from(rows.begin, -1);
    counter.add_from(rows.end, 1);
  }
  /// The union of the intervals and the rows that the positions hide, both ascending.
  void subtract_union(int64_t key, RowCounter& counter) {
    both_.clear();
    positions_.add_hidden(key, both_);
    const auto middle = static_cast<std::ptrdiff_t>(both_.size());
    rows_.for_each_hidden(static_cast<int32_t>(key), [this](rules::Interval hidden) { both_.push_back(hidden); });
    std::inplace_merge(both_.begin(), both_.begin() + middle, both_.end(),
                       [](const rules::Interval& a, const rules::Interval& b) { return a.begin < b.begin; });
    int32_t taken = 0;  // all rows before are visible or have been taken
    for (const rules::Interval& rows : both_) {
      const int32_t begin = std::max(rows.begin, taken);
      if (begin < rows.end) take(rules::Interval{begin, rows.end}, counter);
      taken = std::max(taken, rows.end);
    }
  }

  ColumnRows rows_;
  bool has_positions_;
  PositionRows positions_;
  std::vector<rules::Interval> both_;
};

/// The keys that are counted, ascending.
class CountedKeys {
 public:
  CountedKeys(int64_t seqlen_k, int64_t most)
      : seqlen_k_(seqlen_k), count_(most ? std::min(most, seqlen_k) : seqlen_k) {}

  int64_t count() const { return count_; }
  /// The middles of `count` equal parts; but the end, so that the last cell, which may be narrow, has a key.
  int64_t operator[](int64_t n) const {
    if (count_ == seqlen_k_) return n;
    return n == count_ - 1 ? seqlen_k_ - 1 : (2 * n + 1) * seqlen_k_ / (2 * count_);
  }

 private:
  int64_t seqlen_k_, count_;
};

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

/// Adds tiles that come after all of `runs`.
void append(std::vector<TileRun>& runs, int64_t begin, int64_t end) {
  if (!runs.empty() && runs.back().end == begin) {
    runs.back().end = end;
  } else {
    runs.push_back({begin, end});
  }
}

/// Counts in how many intervals each row tile lies, without walking the tiles.
class TileCounter {
 public:
  /// `number` is the interval's within its key: the key before is likely to have had the same tiles there.
  void add(std::size_t number, rules::Interval tiles) {
    if (tiles.begin >= tiles.end) return;
    const std::size_t slot = number % counted_.size();
    if (counted_[slot].tiles.begin != tiles.begin || counted_[slot].tiles.end != tiles.end) {
      put_down(counted_[slot]);
      counted_[slot] = {tiles, 0};
    }
    ++counted_[slot].times;
  }

  /// Sets `runs` to those of the first `tiles` tiles whose count is accepted, and starts again.
  template <typename Accept>
  void take(int64_t tiles, Accept&& accept, std::vector<TileRun>& runs) {
    for (Counted& counted : counted_) put_down(std::exchange(counted, {}));
    std::sort(changes_.begin(), changes_.end(), [](const Change& a, const Change& b) { return a.tile < b.tile; });
    runs.clear();
    int64_t at = 0;
    int32_t count = 0;
    for (const Change& change : changes_) {
      if (change.tile > at && accept(count)) append(runs, at, change.tile);
      at = change.tile;
      count += change.by;
    }
    if (tiles > at && accept(count)) append(runs, at, tiles);
    changes_.clear();
  }

 private:
  struct Counted {
    rules::Interval tiles{};
    int32_t times = 0;
  };
  struct Change {
    int32_t tile, by;
  };

  void put_down(const Counted& counted) {
    if (counted.times == 0) return;
    changes_.push_back({counted.tiles.begin, counted.times});
    changes_.push_back({counted.tiles.end, -counted.times});
  }

  std::array<Counted, 4> counted_{};  ///< last interval of each slot
  std::vector<Change> changes_;
};

/// The tile columns of a mask without a block mask, by the rules of the library's own classification.
void classify_columns(const MaskView& view, int64_t batch, int64_t head, TileShape tile,
                      const std::function<void(const TileColumn&)>& f) {
  const auto seqlen_q = static_cast<int32_t>(view.seqlen_q);
  const auto tile_rows = static_cast<int32_t>(std::min(tile.rows, kMaxSeqlen));
  const int64_t row_tiles = ceil_div(view.seqlen_q, tile.rows), key_tiles = ceil_div(view.seqlen_k, tile.keys);
  const ColumnRows column = column_rows(view, batch, head);
  TileCounter covered, touched;
  std::vector<TileRun> live, full;
  for (int64_t c = 0; c < key_tiles; ++c) {
    const int64_t begin = c * tile.keys, end = c + 1 < key_tiles ? begin + tile.keys : view.seqlen_k;
    for (int64_t j = begin; j < end; ++j) {
      std::size_t number = 0;
      column.for_each_hidden(static_cast<int32_t>(j), [&](rules::Interval hidden) {
        covered.add(number, rules::covered_tiles(hidden, tile_rows, seqlen_q));
        touched.add(number, rules::touched_tiles(hidden, tile_rows));
        ++number;
      });
    }
    const auto keys = static_cast<int32_t>(end - begin);
    covered.take(row_tiles, [keys](int32_t count) { return rules::is_live(count, keys); }, live);
    touched.take(row_tiles, [](int32_t count) { return rules::is_full(count); }, full);
    f({c, live, full});
  }
}

/// Tile columns under a block mask, whose blocks need not line up with the tiles: counts visible elements of every
/// tile.
void count_columns(const MaskView& mask, int64_t batch, int64_t head, TileShape tile,
                   const std::function<void(const TileColumn&)>& f) {
  // A tile beyond the end is as good as one that ends there, and its side multiplies without overflow.
  tile = {.rows = std::min(tile.rows, std::max<int64_t>(mask.seqlen_q, 1)),
          .keys = std::min(tile.keys, std::max<int64_t>(mask.seqlen_k, 1))};
  const Partition rows(mask.seqlen_q, tile.rows), keys(mask.seqlen_k, tile.keys);
  std::vector<TileRun> live, full;
  for_each_visible_column(mask, {.batch = batch, .head = head, .row_step = tile.rows, .key_step = tile.keys},
                          [&](int64_t c, int64_t, std::span<const int64_t> visible) {
                            live.clear();
                            full.clear();
                            for (int64_t r = 0; r < rows.parts(); ++r) {
                              const int64_t seen = visible[static_cast<std::size_t>(r)];
                              if (seen > 0) append(live, r, r + 1);
                              if (seen == rows.size(r) * keys.size(c)) append(full, r, r + 1);
                            }
                            f({c, live, full});
                          });
}

/// Tile columns of a band over positions, put together from the parts that are classified.
void classify_positions(const MaskView& view, int64_t batch, int64_t head, TileShape tile,
                        const std::function<void(const TileColumn&)>& f) {
  const TileGrid grid = classify_tiles(view, batch, head, tile);
  std::vector<TileRun> live, full;
  for (int64_t c = 0; c < grid.key_tiles; ++c) {
    live.clear();
    full.clear();
    for (int64_t r = 0; r < grid.row_tiles; ++r) {
      if (grid.at(r, c) != TileClass::kEmpty) append(live, r, r + 1);
      if (grid.at(r, c) == TileClass::kFull) append(full, r, r + 1);
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

void check_entry(const MaskView& mask, int64_t batch, int64_t head) {
  if (batch >= 0 && batch < mask.batch() && head >= 0 && head < mask.heads()) return;
  throw_invalid("(batch ", batch, ", head ", head, ") is outside of the mask's [", mask.batch(), ", ", mask.heads(),
                "]");
}

void check_tile(TileShape tile) {
  if (tile.rows < 1 || tile.keys < 1)
    throw_invalid("tile is ", tile.rows, "x", tile.keys, "; both sides must be at least 1");
}

void for_each_visible_column(const MaskView& mask, const Cells& cells,
                             const std::function<void(int64_t, int64_t, std::span<const int64_t>)>& f) {
  require_host(mask, "the count of visible elements");
  KeptBlocks blocks(mask, cells.batch, cells.head);
  const Partition row_cells(mask.seqlen_q, cells.row_step), key_cells(mask.seqlen_k, cells.key_step);
  // Under a block mask, counted in parts that lie within one cell and one block.
  const int64_t block = blocks.all() ? 0 : kBlockMaskSize;
  const Partition row_parts(mask.seqlen_q, cells.row_step, block), key_parts(mask.seqlen_k, cells.key_step, block);
  const std::vector<std::size_t> row_cell = parts_around(row_parts, row_cells),
                                 row_block = parts_around(row_parts, Partition(mask.seqlen_q, kBlockMaskSize));
  HiddenRowTaker hidden(mask, cells.batch, cells.head);
  const CountedKeys keys(mask.seqlen_k, cells.most_keys);
  RowCounter counter(row_parts);
  std::vector<int64_t> visible(static_cast<std::size_t>(row_cells.parts()));
  int64_t in_cell = 0;
  for (int64_t p = 0, next = 0; p < key_parts.parts(); ++p) {
    const int64_t first = next;
    for (; next < keys.count() && keys[next] < key_parts.end(p); ++next) hidden.take(keys[next], counter);
    if (next > first) {
      counter.add_from(0, next - first);
      const std::span<const int64_t> seen = counter.take();
      const std::span<const uint64_t> kept = blocks.column(key_parts.begin(p) / kBlockMaskSize);
      for (std::size_t r = 0; r < seen.size(); ++r) {
        const auto is_kept = static_cast<int64_t>(kept[row_block[r] / 64] >> (row_block[r] % 64) & 1);
        visible[row_cell[r]] += is_kept * seen[r];  // a branch would be mispredicted in a random block mask
      }
      in_cell += next - first;
    }
    const int64_t key_cell = key_cells.part_of(key_parts.begin(p));
    if (key_parts.end(p) != key_cells.end(key_cell)) continue;
    f(key_cell, in_cell, visible);
    std::fill(visible.begin(), visible.end(), 0);
    in_cell = 0;
  }
}

void for_each_tile_column(const MaskView& mask, int64_t batch, int64_t head, TileShape tile,
                          const std::function<void(const TileColumn&)>& f) {
  require_host(mask, "the count of tiles");
  if (compares_positions(mask)) {
    classify_positions(mask, batch, head, tile, f);
  } else if (mask.block_mask) {
    count_columns(mask, batch, head, tile, f);
  } else {
    classify_columns(mask, batch, head, tile, f);
  }
}

}  // namespace flashmask
