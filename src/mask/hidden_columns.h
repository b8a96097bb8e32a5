// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "flashmask/mask.h"
#include "mask/rules.h"

namespace flashmask {

/// Rows that each column is hidden from, as any number of ascending intervals with gaps between them: every conversion
/// and composition goes through it. Linear in the number of intervals.
class HiddenColumns {
 public:
  HiddenColumns(int64_t seqlen_q, int64_t seqlen_k, int64_t batch, int64_t heads);

  /// The columns of a mask without its block mask, at the mask's batch and heads.
  static HiddenColumns of(const Mask& mask);

  int64_t seqlen_q() const { return seqlen_q_; }
  int64_t seqlen_k() const { return seqlen_k_; }
  int64_t batch() const { return batch_; }
  int64_t heads() const { return heads_; }

  /// Adds the next column (in the order batch, head, column) from intervals in any order, clamped to
  /// [0, seqlen_q], possibly overlapping; `hidden` is used as scratch.
  void append(std::vector<rules::Interval>& hidden);

  /// `column` counts over batch, heads and keys.
  std::span<const rules::Interval> operator[](int64_t column) const {
    const auto begin = static_cast<std::size_t>(begin_[static_cast<std::size_t>(column)]);
    const auto end = static_cast<std::size_t>(begin_[static_cast<std::size_t>(column) + 1]);
    return {intervals_.data() + begin, end - begin};
  }
  int64_t count() const { return batch_ * heads_ * seqlen_k_; }

  /// The tightest bands that hide nothing visible, around q_offset: none, upper edge (causal), lower edge
  /// (left), both. Only `none` if nothing is visible.
  std::vector<Band> tightest_bands(int64_t q_offset) const;

  /// True if every element outside of the band is hidden.
  bool contains_outside_of(const Band& band, int64_t q_offset) const;

 private:
  int64_t seqlen_q_, seqlen_k_, batch_, heads_;
  std::vector<int64_t> begin_{0};
  std::vector<rules::Interval> intervals_;
};

/// How to lay out intervals when no column needs more than one.
enum class Layout {
  kFewestIntervals,  ///< all in (lts, lte)
  kFewestVectors,    ///< rows from 0 on in ute, rows up to seqlen_q in lts, if there are no others
};

/// At most `limit` (1 or 2) intervals per column beside `band`, which must hide nothing visible; nothing if a
/// column needs more.
std::optional<MaskParts> try_fit(const HiddenColumns& columns, const Band& band, int64_t q_offset, int limit,
                                 Layout layout);

/// Fits at most two intervals per column beside one of `candidates` (bands that hide nothing visible): the
/// fewest intervals win, ties in the order given. Throws kUnrepresentable, saying `what` does not fit and
/// naming the first column that does not.
MaskParts fit_two_intervals(const HiddenColumns& columns, std::span<const Band> candidates, int64_t q_offset,
                            std::string_view what, Layout layout = Layout::kFewestIntervals);

}  // namespace flashmask
