// SPDX-License-Identifier: Apache-2.0
#include "mask/hidden_columns.h"

#include <algorithm>
#include <optional>

#include "common/message.h"
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

void drop_if_all(std::vector<int32_t>& values, int32_t value) {
  if (std::all_of(values.begin(), values.end(), [value](int32_t v) { return v == value; })) values.clear();
}

MaskParts write_intervals(const HiddenColumns& columns, const Band& band, int64_t q_offset, int most, Layout layout) {
  MaskParts parts{.seqlen_q = columns.seqlen_q(),
                  .seqlen_k = columns.seqlen_k(),
                  .band = band,
                  .q_offset = q_offset,
                  .batch = columns.batch(),
                  .heads = columns.heads()};
  if (most == 0) return parts;
  const BandRows rows(band, q_offset, columns.seqlen_q());
  const auto n = static_cast<std::size_t>(columns.count());
  const auto end = static_cast<int32_t>(columns.seqlen_q());
  parts.lts.assign(n, end);
  parts.lte.assign(n, end);
  parts.uts.assign(n, 0);
  parts.ute.assign(n, 0);
  for (std::size_t at = 0; at < n; ++at) {
    const auto column = static_cast<int64_t>(at);
    std::optional<Interval> first, second;
    for_each_part(columns[column], rows.inside(column % columns.seqlen_k()),
                  [&](Interval part) { (first ? second : first) = part; });
    // A single run goes where the smaller vector form wants it: up from row 0, or down to the last row.
    const bool one_pair = most == 1 && layout == Layout::kFewestIntervals;
    if (first && !second && (one_pair || first->begin > 0 || first->end == end)) std::swap(first, second);
    if (first) parts.uts[at] = first->begin, parts.ute[at] = first->end;
    if (second) parts.lts[at] = second->begin, parts.lte[at] = second->end;
  }
  drop_if_all(parts.lte, end);
  if (parts.lte.empty()) drop_if_all(parts.lts, end);
  drop_if_all(parts.uts, 0);
  if (parts.uts.empty()) drop_if_all(parts.ute, 0);
  return parts;
}

}  // namespace

HiddenColumns::HiddenColumns(int64_t seqlen_q, int64_t seqlen_k, int64_t batch, int64_t heads)
    : seqlen_q_(seqlen_q), seqlen_k_(seqlen_k), batch_(batch), heads_(heads) {
  begin_.reserve(static_cast<std::size_t>(batch * heads * seqlen_k) + 1);
}

HiddenColumns HiddenColumns::of(const Mask& mask) {
  const MaskView& view = mask.view();
  require_host(view, "the conversion or composition");
  HiddenColumns result(view.seqlen_q, view.seqlen_k, view.batch(), view.heads());
  std::vector<Interval> hidden;
  for (int64_t b = 0; b < view.batch(); ++b) {
    for (int64_t h = 0; h < view.heads(); ++h) {
      const rules::Columns column = columns(view, b, h);
      const PositionRows positions(position_band(view, b), view.seqlen_q);
      for (int64_t j = 0; j < view.seqlen_k; ++j) {
        const rules::HiddenRows rows = rules::hidden_rows(column, static_cast<int32_t>(j));
        hidden.assign(std::begin(rows.interval), std::end(rows.interval));
        positions.add_hidden(j, hidden);
        result.append(hidden);
      }
    }
  }
  return result;
}

void HiddenColumns::append(std::vector<Interval>& hidden) {
  std::erase_if(hidden, [](const Interval& x) { return x.begin >= x.end; });
  std::sort(hidden.begin(), hidden.end(), [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
  const std::size_t first = intervals_.size();
  for (const Interval& x : hidden) {
    if (intervals_.size() > first && x.begin <= intervals_.back().end) {
      intervals_.back().end = std::max(intervals_.back().end, x.end);
    } else {
      intervals_.push_back(x);
    }
  }
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

std::optional<MaskParts> try_fit(const HiddenColumns& columns, const Band& band, int64_t q_offset, int limit,
                                 Layout layout) {
  const int most = count_needed(columns, BandRows(band, q_offset, columns.seqlen_q())).most;
  if (most > limit) return std::nullopt;
  return write_intervals(columns, band, q_offset, most, layout);
}

MaskParts fit_two_intervals(const HiddenColumns& columns, std::span<const Band> candidates, int64_t q_offset,
                            std::string_view what, Layout layout) {
  const Band* best = nullptr;
  Need need;
  for (const Band& band : candidates) {
    const Need n = count_needed(columns, BandRows(band, q_offset, columns.seqlen_q()));
    if (best && n.most >= need.most) continue;
    best = &band;
    need = n;
  }
  if (need.most > 2) {
    const int64_t j = need.first_misfit % columns.seqlen_k(), bh = need.first_misfit / columns.seqlen_k();
    throw Error(ErrorCode::kUnrepresentable,
                message(what, " does not fit two row intervals per key column: (batch ", bh / columns.heads(),
                        ", head ", bh % columns.heads(), ", column ", j, ") needs ", need.misfit_needs),
                j);
  }
  return write_intervals(columns, *best, q_offset, need.most, layout);
}

}  // namespace flashmask
