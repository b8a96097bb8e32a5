// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

#include "mask/rules.h"

namespace flashmask {

/// Hidden rows of the columns of one batch entry and head: what the band and the two intervals hide, or the band and
/// the column's interval list. For the host alone: kernels read rules::Columns.
class ColumnRows {
 public:
  /// Columns without lists.
  ColumnRows(const rules::Columns& columns) : columns_(columns) {}  // NOLINT: most callers have these
  /// Columns with the normalised list of column j at intervals [column_ptr[j], column_ptr[j + 1]).
  ColumnRows(const rules::Columns& columns, const int32_t* column_ptr, const int32_t* intervals)
      : columns_(columns), column_ptr_(column_ptr), intervals_(intervals) {}

  const rules::Columns& columns() const { return columns_; }
  bool has_lists() const { return column_ptr_ != nullptr; }

  /// Calls f(interval) for every hidden run of a column, ascending, with gaps between them.
  template <typename F>
  void for_each_hidden(int32_t j, F&& f) const {
    const rules::HiddenRows hidden = rules::hidden_rows(columns_, j);
    if (has_lists()) return merge_list(j, hidden.interval[0], hidden.interval[1], f);
    rules::Interval merged[4];
    const int n = rules::merge(hidden, merged);
    for (int k = 0; k < n; ++k) f(merged[k]);
  }

  /// Calls f(interval) for the intervals of a column's list, not of the band, that reach into rows [begin, end).
  template <typename F>
  void for_each_listed(int32_t j, int32_t begin, int32_t end, F&& f) const {
    for (int32_t n = first_ending_after(j, begin); n < column_ptr_[j + 1] && at(n).begin < end; ++n) f(at(n));
  }

  bool is_visible(int32_t i, int32_t j) const {
    if (!rules::is_visible(columns_, i, j)) return false;
    if (!has_lists()) return true;
    const int32_t n = first_ending_after(j, i);
    return n == column_ptr_[j + 1] || i < at(n).begin;
  }

 private:
  rules::Interval at(int32_t n) const { return {intervals_[2 * int64_t{n}], intervals_[2 * int64_t{n} + 1]}; }

  /// The first interval of a column's list that ends after row i, or the list's end.
  int32_t first_ending_after(int32_t j, int32_t i) const {
    int32_t first = column_ptr_[j], last = column_ptr_[j + 1];
    while (first < last) {
      const int32_t middle = first + (last - first) / 2;
      if (at(middle).end > i) {
        last = middle;
      } else {
        first = middle + 1;
      }
    }
    return first;
  }

  /// `top` begins at row 0, `bottom` ends at the last.
  template <typename F>
  void merge_list(int32_t j, rules::Interval top, rules::Interval bottom, F&& f) const {
    rules::Interval run = top;
    const auto put = [&](rules::Interval next) {
      if (next.begin <= run.end) {
        run.end = std::max(run.end, next.end);
        return;
      }
      if (run.begin < run.end) f(run);
      run = next;
    };
    const bool has_bottom = bottom.begin < bottom.end;
    for (int32_t n = column_ptr_[j]; n < column_ptr_[j + 1]; ++n) {
      if (has_bottom && at(n).begin >= bottom.begin) break;  // the rest lies in it
      put(at(n));
    }
    if (has_bottom) put(bottom);
    if (run.begin < run.end) f(run);
  }

  rules::Columns columns_;
  const int32_t* column_ptr_ = nullptr;
  const int32_t* intervals_ = nullptr;
};

}  // namespace flashmask
