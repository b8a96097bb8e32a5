// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <optional>
#include <utility>
#include <vector>

#include "common/arithmetic.h"
#include "common/message.h"
#include "flashmask/mask.h"
#include "mask/hidden_columns.h"
#include "mask/host_only.h"
#include "mask/view.h"

namespace flashmask {
namespace {

/// The segments that have something, neighbours as one.
std::vector<RowSegment> runs_of(std::span<const RowSegment> segments) {
  std::vector<RowSegment> runs;
  for (const RowSegment& s : segments) {
    if (s.begin == s.end) continue;
    if (!runs.empty() && runs.back().end == s.begin) {
      runs.back().end = s.end;
    } else {
      runs.push_back(s);
    }
  }
  return runs;
}

void check_segments(const char* what, std::span<const RowSegment> segments, int64_t seqlen, bool ascending) {
  int64_t last = 0, total = 0;
  for (const RowSegment& s : segments) {
    if (s.begin < 0 || s.begin > s.end || s.end > seqlen)
      throw_invalid(what, " segment [", s.begin, ", ", s.end, ") is not within [0, ", seqlen, ")");
    if (ascending && s.begin < last)
      throw_invalid(what, " segment [", s.begin, ", ", s.end, ") begins before ", last,
                    ", where the one before it ends; ", what, " segments must ascend");
    last = s.end;
    total += s.end - s.begin;
    if (total > kMaxSeqlen) throw_invalid(what, " segments add up to more than ", kMaxSeqlen);
  }
}

/// Blocks have to stay whole and where a multiple of 128 begins.
void check_blocks(const char* what, std::span<const RowSegment> runs) {
  for (std::size_t n = 0; n < runs.size(); ++n) {
    const RowSegment& s = runs[n];
    if (s.begin % kBlockMaskSize == 0 && (n + 1 == runs.size() || s.end % kBlockMaskSize == 0)) continue;
    throw_unsupported(what, " segment [", s.begin, ", ", s.end,
                      ") of a mask with a block mask: segments must begin at multiples of 128, and all but the last "
                      "end there");
  }
}

int64_t length(std::span<const RowSegment> runs) {
  int64_t n = 0;
  for (const RowSegment& s : runs) n += s.end - s.begin;
  return n;
}

/// Calls at(i) for each index of the runs.
template <typename At>
void for_each_index(std::span<const RowSegment> runs, const At& at) {
  for (const RowSegment& s : runs) {
    for (int64_t i = s.begin; i < s.end; ++i) at(i);
  }
}

/// How many gathered rows are before a row of the mask.
class RowCount {
 public:
  explicit RowCount(std::span<const RowSegment> runs) : runs_(runs) {
    before_.push_back(0);
    for (const RowSegment& s : runs) before_.push_back(before_.back() + s.end - s.begin);
  }
  int32_t operator()(int64_t row) const {
    const auto next = std::ranges::upper_bound(runs_, row, {}, &RowSegment::begin);
    const auto n = next - runs_.begin();
    if (n == 0) return 0;
    const RowSegment& s = runs_[static_cast<std::size_t>(n - 1)];
    return static_cast<int32_t>(before_[static_cast<std::size_t>(n - 1)] + std::min(row, s.end) - s.begin);
  }

 private:
  std::span<const RowSegment> runs_;
  std::vector<int64_t> before_;
};

/// One stored row interval of every column; an empty vector is row 0, or all rows.
struct Pair {
  std::vector<int32_t> begin, end;
  bool exists() const { return !begin.empty() || !end.empty(); }
};

std::vector<int32_t> gather_bounds(const MaskView& view, std::span<const int32_t> vector, const RowCount& count,
                                   std::span<const RowSegment> keys) {
  std::vector<int32_t> out;
  if (vector.empty()) return out;
  for (int64_t bh = 0; bh < view.bounds_batch * view.bounds_heads; ++bh) {
    for_each_index(keys,
                   [&](int64_t j) { out.push_back(count(vector[static_cast<std::size_t>(bh * view.seqlen_k + j)])); });
  }
  return out;
}

/// The band of a mask as intervals [0, above) and [below, rows) of gathered rows, for each gathered key; empty where
/// the band has no such edge.
Pair band_rows(const MaskView& view, const RowCount& count, std::span<const RowSegment> keys) {
  Pair edges;
  const auto row = [&](int64_t i) { return count(std::clamp<int64_t>(i, 0, view.seqlen_q)); };
  for_each_index(keys, [&](int64_t j) {
    if (view.diagonal_hi != INT32_MAX) edges.end.push_back(row(j - view.diagonal_hi));
    if (view.diagonal_lo != INT32_MIN) edges.begin.push_back(row(j - view.diagonal_lo + 1));
  });
  return edges;
}

/// Lays the intervals `edge` of each key, which all begin at row 0 or all end at the last, into a pair that has such
/// intervals already, or into one that is free; false if there is neither.
bool lay(std::vector<int32_t> Pair::* side, const std::vector<int32_t>& edge, int64_t vectors,
         std::span<Pair* const> pairs) {
  if (edge.empty()) return true;
  const auto other = side == &Pair::begin ? &Pair::end : &Pair::begin;
  for (Pair* pair : pairs) {
    std::vector<int32_t>& own = pair->*side;
    if (own.empty() || !(pair->*other).empty()) continue;
    for (std::size_t n = 0; n < own.size(); ++n) {
      const int32_t x = edge[n % edge.size()];
      own[n] = side == &Pair::begin ? std::min(own[n], x) : std::max(own[n], x);
    }
    return true;
  }
  for (Pair* pair : pairs) {
    if (pair->exists()) continue;
    for (int64_t n = 0; n < vectors; ++n) (pair->*side).insert((pair->*side).end(), edge.begin(), edge.end());
    return true;
  }
  return false;
}

/// The positions that the band compares, of the gathered rows and keys.
void put_positions(const Mask& mask, std::span<const RowSegment> rows, std::span<const RowSegment> keys,
                   MaskParts& parts) {
  constexpr int64_t kFarthest = int64_t{1} << 30;  // so that positions are int32
  const MaskView& view = mask.view();
  if (std::abs(mask.q_offset()) > kFarthest || view.seqlen_q > kFarthest)
    throw_unsupported("q_offset is ", mask.q_offset(), " and seqlen_q ", view.seqlen_q,
                      "; where the band becomes one over positions both are within 2^30 of 0");
  parts.position_batch = view.has_positions ? std::max(view.q_pos_batch, view.k_pos_batch) : 1;
  for (int64_t b = 0; b < parts.position_batch; ++b) {
    const int64_t q = broadcast_index(b, parts.position_batch, view.q_pos_batch) * view.seqlen_q;
    const int64_t k = broadcast_index(b, parts.position_batch, view.k_pos_batch) * view.seqlen_k;
    for_each_index(rows, [&](int64_t i) {
      parts.q_pos.push_back(view.has_positions ? view.q_pos[q + i] : static_cast<int32_t>(i + mask.q_offset()));
    });
    for_each_index(keys, [&](int64_t j) {
      parts.k_pos.push_back(view.has_positions ? view.k_pos[k + j] : static_cast<int32_t>(j));
    });
  }
}

void put_blocks(const Mask& mask, std::span<const RowSegment> rows, std::span<const RowSegment> keys,
                MaskParts& parts) {
  const MaskView& view = mask.view();
  const auto blocks_of = [](std::span<const RowSegment> runs) {
    std::vector<int64_t> blocks;
    for (const RowSegment& s : runs) {
      for (int64_t i = s.begin; i < s.end; i += kBlockMaskSize) blocks.push_back(i / kBlockMaskSize);
    }
    return blocks;
  };
  const std::vector<int64_t> row_blocks = blocks_of(rows), key_blocks = blocks_of(keys);
  const int64_t own_keys = ceil_div(view.seqlen_k, kBlockMaskSize);
  parts.block_batch = view.block_batch;
  parts.block_heads = view.block_heads;
  for (int64_t bh = 0; bh < view.block_batch * view.block_heads; ++bh) {
    const uint8_t* own = view.block_mask + first_block(view, bh);
    for (const int64_t r : row_blocks) {
      for (const int64_t c : key_blocks) parts.block_mask.push_back(own[r * own_keys + c]);
    }
  }
}

/// A mask with interval lists, whose band becomes intervals, too, as far as it is none of the gathered mask. Positions
/// stay, as ALiBi measures by them.
Mask gather_lists(const Mask& mask, std::span<const RowSegment> rows, std::span<const RowSegment> keys) {
  const RowCount count(rows);
  const MaskColumns columns(mask.with_block_mask({}));
  StoredColumns gathered(length(rows), length(keys), columns.batch(), columns.heads());
  std::vector<rules::Interval> hidden;
  for (int64_t bh = 0; bh < columns.batch() * columns.heads(); ++bh) {
    for_each_index(keys, [&](int64_t j) {
      hidden.clear();
      for (const rules::Interval& x : columns[bh * mask.seqlen_k() + j])
        hidden.push_back({count(x.begin), count(x.end)});
      gathered.append(hidden);
    });
  }
  const int64_t q_offset = gathered.seqlen_k() - gathered.seqlen_q();
  const bool has_positions = mask.has_positions();
  MaskParts parts =
      fit_parts(gathered, has_positions ? std::vector{Band::none()} : gathered.tightest_bands(q_offset), q_offset);
  if (has_positions) {
    parts.q_offset.reset();
    put_positions(mask, rows, keys, parts);
  }
  if (mask.has_block_mask()) put_blocks(mask, rows, keys, parts);
  return Mask(std::move(parts));
}

}  // namespace

Mask gather(const Mask& mask, std::span<const RowSegment> rows, std::span<const RowSegment> keys) {
  const MaskView& view = mask.view();
  require_host(view, "gather");
  check_segments("row", rows, view.seqlen_q, true);
  check_segments("key", keys, view.seqlen_k, false);
  const std::vector<RowSegment> row_runs = runs_of(rows), key_runs = runs_of(keys);
  if (mask.has_block_mask()) {
    check_blocks("row", row_runs);
    check_blocks("key", key_runs);
  }
  const RowSegment none;
  if (row_runs.size() <= 1 && key_runs.size() <= 1) {
    const RowSegment row = row_runs.empty() ? none : row_runs[0], key = key_runs.empty() ? none : key_runs[0];
    return crop(mask, row.begin, row.end, key.begin, key.end);
  }
  if (mask.has_interval_lists()) return gather_lists(mask, row_runs, key_runs);
  const RowCount count(row_runs);
  MaskParts parts{.seqlen_q = length(row_runs),
                  .seqlen_k = length(key_runs),
                  .batch = view.bounds_batch,
                  .heads = view.bounds_heads};
  const auto bounds = [&](std::span<const int32_t> vector) { return gather_bounds(view, vector, count, key_runs); };
  Pair first{bounds(mask.lts()), bounds(mask.lte())}, second{bounds(mask.uts()), bounds(mask.ute())};
  bool over_positions = compares_positions(view);
  if (!over_positions && !view.has_positions) {
    const Pair edges = band_rows(view, count, key_runs), before[] = {first, second};
    Pair* const pairs[] = {&first, &second};
    const int64_t vectors = view.bounds_batch * view.bounds_heads;
    if (!lay(&Pair::begin, edges.begin, vectors, pairs) || !lay(&Pair::end, edges.end, vectors, pairs)) {
      first = before[0], second = before[1];
      over_positions = true;
    }
  }
  if (over_positions) parts.band = mask.band();
  parts.lts = std::move(first.begin), parts.lte = std::move(first.end);
  parts.uts = std::move(second.begin), parts.ute = std::move(second.end);
  if (over_positions || view.has_positions) put_positions(mask, row_runs, key_runs, parts);
  if (mask.has_block_mask()) put_blocks(mask, row_runs, key_runs, parts);
  return Mask(std::move(parts));
}

}  // namespace flashmask
