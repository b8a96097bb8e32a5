// SPDX-License-Identifier: Apache-2.0
#include "mask/hidden_columns.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <utility>

#include "common/message.h"
#include "common/ranges.h"
#include "mask/host_only.h"
#include "mask/position_rows.h"
#include "mask/view.h"

namespace flashmask {
namespace {

using rules::Interval;

/// The rows that a band lets a column be seen from: [begin, end), within [0, seqlen_q].
class BandRows {
 public:
  BandRows(const Band& band, int64_t q_offset, int64_t seqlen_q) {
    const Diagonals diagonals = absolute_diagonals(band, q_offset);
    columns_ = {static_cast<int32_t>(seqlen_q), diagonals.lo, diagonals.hi, nullptr, nullptr, nullptr, nullptr};
  }
  Interval inside(int64_t j) const {
    const rules::HiddenRows hidden = rules::hidden_rows(columns_, static_cast<int32_t>(j));
    return {hidden.interval[0].end, hidden.interval[1].begin};
  }

 private:
  rules::Columns columns_;
};

/// The parts of `hidden` that lie in `inside`, the rows the band does not hide already.
template <typename F>
void for_each_part(std::span<const Interval> hidden, Interval inside, F&& f) {
  for (const Interval& x : hidden) {
    const Interval part{std::max(x.begin, inside.begin), std::min(x.end, inside.end)};
    // A run that reaches the band's edge is written up to the end of the run, so that [LTS, seqlen_q) stays that.
    if (part.begin < part.end) f(Interval{part.begin, x.end});
  }
}

int count_parts(std::span<const Interval> hidden, Interval inside) {
  int n = 0;
  for_each_part(hidden, inside, [&](Interval) { ++n; });
  return n;
}

struct Need {
  int most = 0;
  int64_t first_misfit = -1;  ///< the first column that needs more than two
  int misfit_needs = 0;
};

Need count_needed(const HiddenColumns& columns, const BandRows& band) {
  Need need;
  for (int64_t column = 0; column < columns.count(); ++column) {
    const int n = count_parts(columns[column], band.inside(column % columns.seqlen_k()));
    need.most = std::max(need.most, n);
    if (n > 2 && need.first_misfit < 0) {
      need.first_misfit = column;
      need.misfit_needs = n;
    }
  }
  return need;
}

/// The candidate beside which the column with most intervals has the fewest; the first of several.
std::pair<const Band*, Need> fewest_needed(const HiddenColumns& columns, std::span<const Band> candidates,
                                           int64_t q_offset) {
  const Band* best = nullptr;
  Need need;
  for (const Band& band : candidates) {
    const Need n = count_needed(columns, BandRows(band, q_offset, columns.seqlen_q()));
    if (best && n.most >= need.most) continue;
    best = &band;
    need = n;
  }
  return {best, need};
}

/// Drops empty intervals, and sorts and joins the others.
void merge(std::vector<Interval>& hidden) {
  std::erase_if(hidden, [](const Interval& x) { return x.begin >= x.end; });
  join_ranges(hidden);
}

/// Bounds of a column that hides nothing.
ColumnBounds empty_bounds(const HiddenColumns& columns) {
  const auto end = static_cast<int32_t>(columns.seqlen_q());
  return {end, end, 0, 0};
}

}  // namespace

MaskColumns::MaskColumns(Mask mask)
    : HiddenColumns(mask.seqlen_q(), mask.seqlen_k(), mask.batch(), mask.heads()), mask_(std::move(mask)) {
  require_host(mask_.view(), "the conversion or composition");
  for (int64_t b = 0; b < batch(); ++b) positions_.emplace_back(position_band(mask_.view(), b), seqlen_q());
}

std::span<const Interval> MaskColumns::operator[](int64_t column) const {
  const int64_t j = column % seqlen_k(), bh = column / seqlen_k();
  const int64_t b = bh / heads(), h = bh % heads();
  hidden_.clear();
  column_rows(mask_.view(), b, h).for_each_hidden(static_cast<int32_t>(j), [this](Interval x) {
    hidden_.push_back(x);
  });
  if (compares_positions(mask_.view())) {
    positions_[static_cast<std::size_t>(b)].add_hidden(j, hidden_);
    merge(hidden_);
  }
  return hidden_;
}

StoredColumns::StoredColumns(int64_t seqlen_q, int64_t seqlen_k, int64_t batch, int64_t heads)
    : HiddenColumns(seqlen_q, seqlen_k, batch, heads) {
  begin_.reserve(static_cast<std::size_t>(count()) + 1);
}

void StoredColumns::append(std::vector<Interval>& hidden) {
  merge(hidden);
  intervals_.insert(intervals_.end(), hidden.begin(), hidden.end());
  begin_.push_back(static_cast<int64_t>(intervals_.size()));
}

std::vector<Band> HiddenColumns::tightest_bands(int64_t q_offset) const {
  std::optional<int64_t> lo, hi;
  for (int64_t column = 0; column < count(); ++column) {
    const auto hidden = (*this)[column];
    const int64_t j = column % seqlen_k_;
    const int64_t first = !hidden.empty() && hidden.front().begin == 0 ? hidden.front().end : 0;
    const int64_t last = (!hidden.empty() && hidden.back().end == seqlen_q_ ? hidden.back().begin : seqlen_q_) - 1;
    if (first > last) continue;  // nothing visible in this column
    hi = std::max(hi.value_or(j - first), j - first);
    lo = std::min(lo.value_or(j - last), j - last);
  }
  if (!lo) return {Band::none()};
  *lo -= q_offset;
  *hi -= q_offset;
  return {Band::none(), Band{.lo = std::nullopt, .hi = hi}, Band{.lo = lo, .hi = std::nullopt},
          Band{.lo = lo, .hi = hi}};
}

bool HiddenColumns::contains_outside_of(const Band& band, int64_t q_offset) const {
  const BandRows rows(band, q_offset, seqlen_q_);
  for (int64_t column = 0; column < count(); ++column) {
    const auto hidden = (*this)[column];
    Interval inside = rows.inside(column % seqlen_k_);
    if (inside.begin >= inside.end) inside = {static_cast<int32_t>(seqlen_q_), static_cast<int32_t>(seqlen_q_)};
    const bool above =
        inside.begin == 0 || (!hidden.empty() && hidden.front().begin == 0 && hidden.front().end >= inside.begin);
    const bool below = inside.end == seqlen_q_ ||
                       (!hidden.empty() && hidden.back().end == seqlen_q_ && hidden.back().begin <= inside.end);
    if (!above || !below) return false;
  }
  return true;
}

Fit::Fit(const HiddenColumns& columns, const Band& band, int64_t q_offset, int most, Layout layout)
    : columns_(columns), band_(band), q_offset_(q_offset), one_pair_(most == 1 && layout == Layout::kFewestIntervals) {
  if (most == 0) return;
  const ColumnBounds empty = empty_bounds(columns);
  for (int64_t column = 0; column < columns.count(); ++column) {
    const ColumnBounds bounds = (*this)[column];
    for (std::size_t v = 0; v < bounds.size(); ++v) has_[v] |= bounds[v] != empty[v];
  }
}

ColumnBounds Fit::operator[](int64_t column) const {
  const auto end = static_cast<int32_t>(columns_.seqlen_q());
  const BandRows rows(band_, q_offset_, columns_.seqlen_q());
  std::optional<Interval> first, second;
  for_each_part(columns_[column], rows.inside(column % columns_.seqlen_k()),
                [&](Interval part) { (first ? second : first) = part; });
  // A single run goes where the smaller vector form wants it: up from row 0, or down to the last row.
  if (first && !second && (one_pair_ || first->begin > 0 || first->end == end)) std::swap(first, second);
  ColumnBounds bounds = empty_bounds(columns_);
  if (second) bounds[0] = second->begin, bounds[1] = second->end;
  if (first) bounds[2] = first->begin, bounds[3] = first->end;
  return bounds;
}

MaskParts Fit::parts() const {
  MaskParts parts{.seqlen_q = columns_.seqlen_q(),
                  .seqlen_k = columns_.seqlen_k(),
                  .band = band_,
                  .q_offset = q_offset_,
                  .batch = columns_.batch(),
                  .heads = columns_.heads()};
  for (const auto vector : kVectors) {
    if (has(vector)) (parts.*vector).reserve(static_cast<std::size_t>(columns_.count()));
  }
  if (std::ranges::none_of(has_, std::identity{})) return parts;
  for (int64_t column = 0; column < columns_.count(); ++column) {
    const ColumnBounds bounds = (*this)[column];
    for (std::size_t v = 0; v < bounds.size(); ++v) {
      if (has_[v]) (parts.*kVectors[v]).push_back(bounds[v]);
    }
  }
  return parts;
}

std::optional<Fit> try_fit(const HiddenColumns& columns, const Band& band, int64_t q_offset, int limit, Layout layout) {
  const int most = count_needed(columns, BandRows(band, q_offset, columns.seqlen_q())).most;
  if (most > limit) return std::nullopt;
  return Fit(columns, band, q_offset, most, layout);
}

MaskParts list_parts(const HiddenColumns& columns, const Band& band, int64_t q_offset) {
  MaskParts parts{.seqlen_q = columns.seqlen_q(),
                  .seqlen_k = columns.seqlen_k(),
                  .band = band,
                  .q_offset = q_offset,
                  .batch = columns.batch(),
                  .heads = columns.heads()};
  const BandRows rows(band, q_offset, columns.seqlen_q());
  const auto end_list = [&parts] {
    const std::size_t count = parts.intervals.size() / 2;
    if (count > INT32_MAX)
      throw_unsupported("the mask needs more than ", INT32_MAX, " hidden intervals, the most that its lists hold");
    parts.column_ptr.push_back(static_cast<int32_t>(count));
  };
  for (int64_t column = 0; column < columns.count(); ++column) {
    const int64_t j = column % columns.seqlen_k();
    if (j == 0) end_list();
    for_each_part(columns[column], rows.inside(j),
                  [&](Interval part) { parts.intervals.insert(parts.intervals.end(), {part.begin, part.end}); });
    end_list();
  }
  return parts;
}

MaskParts fit_parts(const HiddenColumns& columns, std::span<const Band> candidates, int64_t q_offset) {
  const auto [band, need] = fewest_needed(columns, candidates, q_offset);
  if (need.most > 2) return list_parts(columns, *band, q_offset);
  return Fit(columns, *band, q_offset, need.most, Layout::kFewestIntervals).parts();
}

Fit fit_two_intervals(const HiddenColumns& columns, std::span<const Band> candidates, int64_t q_offset,
                      std::string_view what, Layout layout) {
  const auto [best, need] = fewest_needed(columns, candidates, q_offset);
  if (need.most > 2) {
    const int64_t j = need.first_misfit % columns.seqlen_k(), bh = need.first_misfit / columns.seqlen_k();
    throw Error(ErrorCode::kUnrepresentable,
                message(what, " does not fit two row intervals per key column: (batch ", bh / columns.heads(),
                        ", head ", bh % columns.heads(), ", column ", j, ") needs ", need.misfit_needs),
                j);
  }
  return {columns, *best, q_offset, need.most, layout};
}

}  // namespace flashmask
