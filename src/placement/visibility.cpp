// SPDX-License-Identifier: Apache-2.0
#include "placement/visibility.h"

#include <algorithm>
#include <bit>

#include "common/arithmetic.h"
#include "flashmask/plan.h"
#include "mask/tile_classifier.h"
#include "mask/view.h"

namespace flashmask::placement {
namespace {

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
    if (end == bits) break;
    begin = next(end, 0);
  }
}

/// Clears the units that `keep` hides from a key block. Blocks hold a whole number of units, or units of blocks.
void clear_hidden_blocks(const MaskView& mask, const uint8_t* keep, int64_t key_block, int64_t unit,
                         std::span<uint64_t> live) {
  const int64_t key_blocks = ceil_div(mask.seqlen_k, kBlockMaskSize), units = ceil_div(mask.seqlen_q, unit);
  for (int64_t u = 0; u < units; ++u) {
    bool kept = false;
    for (int64_t row = u * unit; row < std::min((u + 1) * unit, mask.seqlen_q); row += kBlockMaskSize)
      kept |= keep[row / kBlockMaskSize * key_blocks + key_block] != 0;
    if (!kept) live[static_cast<std::size_t>(u / 64)] &= ~(uint64_t{1} << (u % 64));
  }
}

/// The units that see some of a column's keys, as ascending ranges.
using Ranges = std::vector<LiveRun>;

void append_seeing_units(const rules::Columns& columns, int64_t key, int64_t unit, Ranges& ranges) {
  rules::Interval hidden[4];
  const int n = rules::merge(rules::hidden_rows(columns, static_cast<int32_t>(key)), hidden);
  int32_t visible_from = 0;
  const auto add = [&](int32_t end) {
    if (visible_from >= end) return;
    const rules::Interval units = rules::touched_tiles({visible_from, end}, static_cast<int32_t>(unit));
    ranges.push_back({0, units.begin, units.end});
  };
  for (int k = 0; k < n; ++k) {
    add(hidden[k].begin);
    visible_from = hidden[k].end;
  }
  add(columns.seqlen_q);
}

/// Adds up, for each rank, keys that are seen from ranges of units.
class KeyCount {
 public:
  KeyCount(std::span<const int32_t> owner, int64_t ranks)
      : owner_(owner), stamp_(static_cast<std::size_t>(ranks), 0), keys_(static_cast<std::size_t>(ranks), 0) {
    next_other_.resize(owner.size());
    for (std::size_t u = owner.size(); u-- > 0;) {
      const bool same = u + 1 < owner.size() && owner[u + 1] == owner[u];
      next_other_[u] = same ? next_other_[u + 1] : static_cast<int32_t>(u) + 1;
    }
  }

  /// `keys` keys of unit `home`, seen from the units of `ranges`.
  void add(const Ranges& ranges, int64_t home, int64_t keys) {
    ++now_;
    stamp_[static_cast<std::size_t>(owner_[static_cast<std::size_t>(home)])] = now_;
    for (const LiveRun& range : ranges) {
      for (int32_t u = range.begin; u < range.end; u = next_other_[static_cast<std::size_t>(u)]) {
        const auto rank = static_cast<std::size_t>(owner_[static_cast<std::size_t>(u)]);
        if (stamp_[rank] == now_) continue;
        stamp_[rank] = now_;
        keys_[rank] += keys;
      }
    }
  }

  std::vector<int64_t> keys() && { return std::move(keys_); }

 private:
  std::span<const int32_t> owner_;
  std::vector<int32_t> next_other_;  // where a run of units of one rank ends
  std::vector<int64_t> stamp_, keys_;
  int64_t now_ = 0;
};

/// By the intervals of each column. Neighbours that the same units see are counted together.
void count_by_columns(const MaskView& mask, int64_t batch, int64_t unit, KeyCount& count) {
  std::vector<rules::Columns> heads;
  for (int64_t h = 0; h < mask.heads(); ++h) heads.push_back(columns(mask, batch, h));
  const auto same = [](const LiveRun& a, const LiveRun& b) { return a.begin == b.begin && a.end == b.end; };
  Ranges ranges, previous;
  for (int64_t home = 0; home * unit < mask.seqlen_k; ++home) {
    int64_t equal = 0;
    for (int64_t j = home * unit; j < std::min((home + 1) * unit, mask.seqlen_k); ++j) {
      ranges.clear();
      for (const rules::Columns& head : heads) append_seeing_units(head, j, unit, ranges);
      if (equal > 0 && !std::equal(ranges.begin(), ranges.end(), previous.begin(), previous.end(), same)) {
        count.add(previous, home, equal);
        equal = 0;
      }
      ++equal;
      std::swap(ranges, previous);
    }
    count.add(previous, home, equal);
  }
}

/// By live tiles: `runs` ascend by key block in each head, here in all.
void count_by_tiles(const MaskView& mask, std::vector<LiveRun> runs, int64_t unit, KeyCount& count) {
  std::stable_sort(runs.begin(), runs.end(),
                   [](const LiveRun& a, const LiveRun& b) { return a.key_block < b.key_block; });
  for (auto begin = runs.begin(); begin != runs.end();) {
    const auto end = std::find_if(begin, runs.end(), [&](const LiveRun& r) { return r.key_block != begin->key_block; });
    const Ranges ranges(begin, end);
    const int64_t key_end = std::min((begin->key_block + 1) * kGranuleKeys, mask.seqlen_k);
    for (int64_t j = begin->key_block * kGranuleKeys; j < key_end;) {  // a key block may be several units
      const int64_t next = std::min(key_end, (j / unit + 1) * unit);
      count.add(ranges, j / unit, next - j);
      j = next;
    }
    begin = end;
  }
}

}  // namespace

Visibility visibility(const MaskView& mask, int64_t unit) {
  Visibility seen{.unit = unit, .units = ceil_div(mask.seqlen_q, unit), .tiles = {}, .runs = {}};
  std::vector<int64_t> steps(static_cast<std::size_t>(seen.units) + 1, 0);
  seen.runs.resize(static_cast<std::size_t>(mask.batch()));
  TileClassifier classifier(mask.seqlen_q, unit);
  std::vector<uint64_t> live(static_cast<std::size_t>(classifier.words())), full(live.size());
  for (int64_t b = 0; b < mask.batch(); ++b) {
    std::vector<LiveRun>& runs = seen.runs[static_cast<std::size_t>(b)];
    classifier.set_positions(position_band(mask, b));
    for (int64_t h = 0; h < mask.heads(); ++h) {
      const rules::Columns column = columns(mask, b, h);
      const uint8_t* keep = block_mask(mask, b, h);
      for (int64_t c = 0; c * kGranuleKeys < mask.seqlen_k; ++c) {
        classifier.classify(column, c * kGranuleKeys, std::min((c + 1) * kGranuleKeys, mask.seqlen_k), live, full);
        if (keep) clear_hidden_blocks(mask, keep, c, unit, live);
        for_each_run(live, [&](int32_t begin, int32_t end) {
          runs.push_back({c, begin, end});
          ++steps[static_cast<std::size_t>(begin)];
          --steps[static_cast<std::size_t>(end)];
        });
      }
    }
  }
  int64_t tiles = 0;
  for (int64_t u = 0; u < seen.units; ++u) seen.tiles.push_back(tiles += steps[static_cast<std::size_t>(u)]);
  return seen;
}

std::vector<int64_t> received_keys(const MaskView& mask, const Visibility& seen, std::span<const int32_t> owner,
                                   int64_t ranks) {
  KeyCount count(owner, ranks);
  for (int64_t b = 0; b < mask.batch(); ++b) {
    if (mask.block_mask || compares_positions(mask)) {
      count_by_tiles(mask, seen.runs[static_cast<std::size_t>(b)], seen.unit, count);
    } else {
      count_by_columns(mask, b, seen.unit, count);
    }
  }
  return std::move(count).keys();
}

}  // namespace flashmask::placement
