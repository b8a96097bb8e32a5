// SPDX-License-Identifier: Apache-2.0
#include "placement/visibility.h"

#include <algorithm>
#include <bit>
#include <optional>
#include <utility>

#include "common/arithmetic.h"
#include "common/ranges.h"
#include "flashmask/plan.h"
#include "mask/tile_classifier.h"
#include "mask/view.h"

namespace flashmask::placement {
namespace {

using Ranges = std::vector<UnitRange>;

/// Calls f(begin, end) for every run of set bits.
template <typename F>
void for_each_run(std::span<const uint64_t> words, F&& f) {
  const auto bits = static_cast<int32_t>(words.size() * 64);
  const auto next = [&](int32_t from, uint64_t flip) {  // the first bit from `from` on that is set once flipped
    for (auto w = static_cast<std::size_t>(from / 64); w < words.size(); ++w) {
      uint64_t word = words[w] ^ flip;
      if (static_cast<int32_t>(w) == from / 64) word &= rules::bits_from<uint64_t>(from % 64);
      if (word) return static_cast<int32_t>(w) * 64 + std::countr_zero(word);
    }
    return bits;
  };
  for (int32_t begin = next(0, 0); begin < bits;) {
    const int32_t end = next(begin, ~uint64_t{0});
    f(begin, end);
    begin = next(end, 0);
  }
}

/// The units with a row that sees a column, whose hidden rows are merged.
void append_units(std::span<const rules::Interval> hidden, int32_t seqlen, int32_t unit, Ranges& ranges) {
  const std::size_t own = ranges.size();
  int32_t visible_from = 0;
  const auto append = [&](int32_t end) {
    if (visible_from >= end) return;
    const rules::Interval units = rules::touched_tiles({visible_from, end}, unit);
    if (ranges.size() > own && units.begin <= ranges.back().end) {  // two intervals of rows may share a unit
      ranges.back().end = units.end;
    } else {
      ranges.push_back({units.begin, units.end});
    }
  };
  for (const rules::Interval& rows : hidden) {
    append(rows.begin);
    visible_from = rows.end;
  }
  append(seqlen);
}

void append_units(const rules::Columns& columns, int64_t key, int32_t unit, Ranges& ranges) {
  rules::Interval hidden[4];
  const int n = rules::merge(rules::hidden_rows(columns, static_cast<int32_t>(key)), hidden);
  append_units({hidden, static_cast<std::size_t>(n)}, columns.seqlen_q, unit, ranges);
}

/// Outline of a column's hidden rows that decides which units see it if no two ends of intervals fall into one unit:
/// columns with equal outlines that are `simple` are seen by the same units. Cheaper to make than ranges of units.
struct Outline {
  int32_t end[8];
  bool operator==(const Outline&) const = default;

  /// `unit_bits`: units have 2^unit_bits rows.
  Outline(const rules::HiddenRows& hidden, int32_t seqlen, int unit_bits) {
    for (std::size_t k = 0; k < 4; ++k) {
      const auto [begin, stop] = hidden.interval[k];
      const bool empty = begin >= stop;
      // The unit of the last visible row before the interval, and of the first after it.
      end[2 * k] = empty ? kNone : begin == 0 ? kNone + 1 : (begin - 1) >> unit_bits;
      end[2 * k + 1] = empty ? kNone : stop == seqlen ? kNone + 1 : stop >> unit_bits;
    }
  }

  bool simple() const {
    for (int a = 0; a < 8; ++a) {
      for (int b = 0; b < a; ++b) {
        if (end[a] >= 0 && end[a] == end[b]) return false;
      }
    }
    return true;
  }

 private:
  static constexpr int32_t kNone = -2;
};

/// Collects which units see the keys of one batch entry, block of keys by block. A block lies in one unit.
class Collector {
 public:
  Collector(const MaskView& mask, int64_t batch, Visibility& seen, std::vector<int64_t>& steps)
      : mask_(mask),
        batch_(batch),
        unit_(static_cast<int32_t>(seen.unit)),
        unit_bits_(std::countr_zero(static_cast<uint64_t>(seen.unit))),
        steps_(steps) {
    for (int64_t h = 0; h < mask.heads(); ++h) heads_.push_back(columns(mask, batch, h));
  }

  SeenKeys by_columns() && {
    std::vector<Ranges> of_head(heads_.size());  // ranges of a block
    std::vector<std::optional<Outline>> outline(heads_.size());
    for_each_block([&](int64_t begin, int64_t end) {
      for (Ranges& ranges : of_head) ranges.clear();
      std::fill(outline.begin(), outline.end(), std::nullopt);
      for (int64_t j = begin; j < end; ++j) {
        if (!follow(j, outline)) {
          ++seen_.groups.back().keys;
          continue;
        }
        ranges_.clear();
        for (std::size_t h = 0; h < heads_.size(); ++h) {
          const std::size_t own = ranges_.size();
          append_units(heads_[h], j, unit_, ranges_);
          of_head[h].insert(of_head[h].end(), ranges_.begin() + static_cast<std::ptrdiff_t>(own), ranges_.end());
        }
        add_group(j, 1);
      }
      for (Ranges& ranges : of_head) {
        join_ranges(ranges);
        count_tiles(ranges);
      }
    });
    return std::move(seen_);
  }

  /// By live tiles, where vectors and a band alone do not say it: a key of a live tile counts as seen.
  SeenKeys by_tiles() && {
    TileClassifier classifier(mask_.seqlen_q, unit_);
    classifier.set_positions(position_band(mask_, batch_));
    std::vector<uint64_t> live(static_cast<std::size_t>(classifier.words())), full(live.size());
    for_each_block([&](int64_t begin, int64_t end) {
      ranges_.clear();
      for (std::size_t h = 0; h < heads_.size(); ++h) {
        classifier.classify(column_rows(mask_, batch_, static_cast<int64_t>(h)), begin, end, live, full);
        clear_hidden_blocks(block_mask(mask_, batch_, static_cast<int64_t>(h)), begin / kBlockMaskSize, live);
        Ranges own;
        for_each_run(live, [&](int32_t from, int32_t to) { own.push_back({from, to}); });
        count_tiles(own);
        ranges_.insert(ranges_.end(), own.begin(), own.end());
      }
      add_group(begin, end - begin);
    });
    return std::move(seen_);
  }

 private:
  template <typename F>
  void for_each_block(F&& f) {
    const int64_t keys = std::min<int64_t>(unit_, kGranuleKeys);
    for (int64_t begin = 0; begin < mask_.seqlen_k; begin += keys) f(begin, std::min(begin + keys, mask_.seqlen_k));
  }

  /// True if other units may see column `key` than the one before. Replaces `outlines` by the column's.
  bool follow(int64_t key, std::vector<std::optional<Outline>>& outlines) const {
    bool other = false;
    for (std::size_t h = 0; h < heads_.size(); ++h) {
      const Outline now(rules::hidden_rows(heads_[h], static_cast<int32_t>(key)), heads_[h].seqlen_q, unit_bits_);
      const std::optional<Outline> before = std::exchange(outlines[h], now);
      other |= before != now || !now.simple();
    }
    return other;
  }

  /// Clears the units all of whose blocks `keep` hides.
  void clear_hidden_blocks(const uint8_t* keep, int64_t key_block, std::span<uint64_t> live) const {
    if (!keep) return;
    const int64_t key_blocks = ceil_div(mask_.seqlen_k, kBlockMaskSize);
    for (int64_t u = 0; u * unit_ < mask_.seqlen_q; ++u) {
      bool kept = false;
      for (int64_t row = u * unit_; row < std::min((u + 1) * unit_, mask_.seqlen_q); row += kBlockMaskSize)
        kept |= keep[row / kBlockMaskSize * key_blocks + key_block] != 0;
      if (!kept) live[static_cast<std::size_t>(u / 64)] &= ~(uint64_t{1} << (u % 64));
    }
  }

  void count_tiles(const Ranges& ranges) {
    for (const UnitRange& range : ranges) {
      ++steps_[static_cast<std::size_t>(range.begin)];
      --steps_[static_cast<std::size_t>(range.end)];
    }
  }

  /// Keys [begin, begin + keys), seen by ranges_.
  void add_group(int64_t begin, int64_t keys) {
    const int64_t unit = begin / unit_;
    if (!seen_.groups.empty() && seen_.groups.back().unit == unit &&
        std::ranges::equal(seen_.seeing(seen_.groups.back()), ranges_)) {
      seen_.groups.back().keys += keys;
      return;
    }
    seen_.groups.push_back({unit, keys, seen_.ranges.size(), ranges_.size()});
    seen_.ranges.insert(seen_.ranges.end(), ranges_.begin(), ranges_.end());
  }

  const MaskView& mask_;
  int64_t batch_;
  int32_t unit_;
  int unit_bits_;
  std::vector<rules::Columns> heads_;
  std::vector<int64_t>& steps_;  // differences of Visibility::tiles, from each unit to the next
  Ranges ranges_;
  SeenKeys seen_;
};

}  // namespace

Visibility visibility(const MaskView& mask, int64_t unit) {
  Visibility seen{.unit = unit, .units = ceil_div(mask.seqlen_q, unit), .tiles = {}, .entries = {}};
  std::vector<int64_t> steps(static_cast<std::size_t>(seen.units) + 1, 0);
  for (int64_t b = 0; b < mask.batch(); ++b) {
    Collector collector(mask, b, seen, steps);
    const bool by_tiles = mask.block_mask || mask.column_ptr || compares_positions(mask);
    seen.entries.push_back(by_tiles ? std::move(collector).by_tiles() : std::move(collector).by_columns());
  }
  int64_t tiles = 0;
  for (int64_t u = 0; u < seen.units; ++u) seen.tiles.push_back(tiles += steps[static_cast<std::size_t>(u)]);
  return seen;
}

std::vector<int64_t> received_keys(const Visibility& seen, std::span<const int32_t> owner, int64_t ranks) {
  std::vector<int32_t> run_end(owner.size());  // end of the unit's run of units of one rank
  for (std::size_t u = owner.size(); u-- > 0;) {
    const bool same = u + 1 < owner.size() && owner[u + 1] == owner[u];
    run_end[u] = same ? run_end[u + 1] : static_cast<int32_t>(u) + 1;
  }
  std::vector<int64_t> keys(static_cast<std::size_t>(ranks), 0), last_group(keys.size(), 0);
  int64_t now = 0;
  for (const SeenKeys& entry : seen.entries) {
    for (const KeyGroup& group : entry.groups) {
      last_group[static_cast<std::size_t>(owner[static_cast<std::size_t>(group.unit)])] = ++now;
      for (const UnitRange& range : entry.seeing(group)) {
        for (int32_t u = range.begin; u < range.end; u = run_end[static_cast<std::size_t>(u)]) {
          const auto rank = static_cast<std::size_t>(owner[static_cast<std::size_t>(u)]);
          if (std::exchange(last_group[rank], now) != now) keys[rank] += group.keys;
        }
      }
    }
  }
  return keys;
}

}  // namespace flashmask::placement
