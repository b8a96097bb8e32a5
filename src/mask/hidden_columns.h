// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "flashmask/mask.h"
#include "mask/position_rows.h"
#include "mask/rules.h"

namespace flashmask {

/// Rows that each column is hidden from, as any number of ascending intervals with gaps between them: every conversion
/// and composition goes through it.
class HiddenColumns {
 public:
  HiddenColumns(int64_t seqlen_q, int64_t seqlen_k, int64_t batch, int64_t heads)
      : seqlen_q_(seqlen_q), seqlen_k_(seqlen_k), batch_(batch), heads_(heads) {}
  virtual ~HiddenColumns() = default;

  int64_t seqlen_q() const { return seqlen_q_; }
  int64_t seqlen_k() const { return seqlen_k_; }
  int64_t batch() const { return batch_; }
  int64_t heads() const { return heads_; }
  int64_t count() const { return batch_ * heads_ * seqlen_k_; }

  /// Intervals of a column, which counts over batch, heads and keys. Valid until the next call.
  virtual std::span<const rules::Interval> operator[](int64_t column) const = 0;

  /// The tightest bands that hide nothing visible, around q_offset: none, upper edge (causal), lower edge
  /// (left), both. Only `none` if nothing is visible.
  std::vector<Band> tightest_bands(int64_t q_offset) const;

  /// True if every element outside of the band is hidden.
  bool contains_outside_of(const Band& band, int64_t q_offset) const;

 private:
  int64_t seqlen_q_, seqlen_k_, batch_, heads_;
};

/// The columns of a mask without its block mask, at the mask's batch and heads. Computes each column when it is asked
/// for: a long mask's intervals take more memory than the mask.
class MaskColumns final : public HiddenColumns {
 public:
  explicit MaskColumns(Mask mask);

  std::span<const rules::Interval> operator[](int64_t column) const override;

 private:
  Mask mask_;
  std::vector<PositionRows> positions_;  ///< one for each batch entry
  mutable std::vector<rules::Interval> hidden_;
};

/// Columns that are put together one after the other. Linear in the number of intervals.
class StoredColumns final : public HiddenColumns {
 public:
  StoredColumns(int64_t seqlen_q, int64_t seqlen_k, int64_t batch, int64_t heads);

  /// Adds the next column (in the order batch, head, column) from intervals in any order, clamped to
  /// [0, seqlen_q], possibly overlapping; `hidden` is used as scratch.
  void append(std::vector<rules::Interval>& hidden);

  std::span<const rules::Interval> operator[](int64_t column) const override {
    const auto begin = static_cast<std::size_t>(begin_[static_cast<std::size_t>(column)]);
    const auto end = static_cast<std::size_t>(begin_[static_cast<std::size_t>(column) + 1]);
    return {intervals_.data() + begin, end - begin};
  }

 private:
  std::vector<int64_t> begin_{0};
  std::vector<rules::Interval> intervals_;
};

/// How to lay out intervals when no column needs more than one.
enum class Layout {
  kFewestIntervals,  ///< all in (lts, lte)
  kFewestVectors,    ///< rows from 0 on in ute, rows up to seqlen_q in lts, if there are no others
};

/// The four vectors of MaskParts, in the order of ColumnBounds.
inline constexpr std::array kVectors{&MaskParts::lts, &MaskParts::lte, &MaskParts::uts, &MaskParts::ute};
using ColumnBounds = std::array<int32_t, kVectors.size()>;
constexpr std::size_t number_of(std::vector<int32_t> MaskParts::* vector) {
  std::size_t n = 0;
  while (kVectors[n] != vector) ++n;
  return n;
}

/// Columns as at most two intervals each beside a band. Borrows the columns, and stores nothing for each of them.
class Fit {
 public:
  /// `most`: how many intervals the column with the most of them needs, at most two.
  Fit(const HiddenColumns& columns, const Band& band, int64_t q_offset, int most, Layout layout);

  ColumnBounds operator[](int64_t column) const;
  /// True if the vector says something: without it LTS and LTE are seqlen_q, UTS and UTE 0.
  bool has(std::vector<int32_t> MaskParts::* vector) const { return has_[number_of(vector)]; }
  /// The band and the vectors that say something.
  MaskParts parts() const;

 private:
  const HiddenColumns& columns_;
  Band band_;
  int64_t q_offset_;
  bool one_pair_;  ///< every interval is in (lts, lte)
  std::array<bool, kVectors.size()> has_{};
};

/// At most `limit` (1 or 2) intervals per column beside `band`, which must hide nothing visible; nothing if a
/// column needs more.
std::optional<Fit> try_fit(const HiddenColumns& columns, const Band& band, int64_t q_offset, int limit, Layout layout);

/// Any number of intervals per column beside `band`, which must hide nothing visible, as interval lists.
MaskParts list_parts(const HiddenColumns& columns, const Band& band, int64_t q_offset);

/// The parts of fit_two_intervals, or interval lists beside the band that needs the fewest where that would throw.
MaskParts fit_parts(const HiddenColumns& columns, std::span<const Band> candidates, int64_t q_offset);

/// Fits at most two intervals per column beside one of `candidates` (bands that hide nothing visible): the
/// fewest intervals win, ties in the order given. Throws kUnrepresentable, saying `what` does not fit and
/// naming the first column that does not.
Fit fit_two_intervals(const HiddenColumns& columns, std::span<const Band> candidates, int64_t q_offset,
                      std::string_view what, Layout layout = Layout::kFewestIntervals);

}  // namespace flashmask
