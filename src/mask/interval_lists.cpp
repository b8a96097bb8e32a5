// SPDX-License-Identifier: Apache-2.0
#include "mask/interval_lists.h"

#include <utility>
#include <vector>

#include "common/arithmetic.h"
#include "common/host_memory.h"
#include "common/message.h"
#include "common/tensor_checks.h"
#include "mask/hidden_columns.h"
#include "mask/rules.h"

namespace flashmask {
namespace {

void check_parts(const MaskParts& parts) {
  for (const auto vector : kVectors) {
    if (!(parts.*vector).empty()) throw_invalid("column_ptr takes the place of lts, lte, uts and ute; leave these out");
  }
  const auto columns = checked_product(parts.batch, parts.heads, parts.seqlen_k + 1);
  if (!columns || static_cast<int64_t>(parts.column_ptr.size()) != *columns)
    throw_invalid("column_ptr has ", parts.column_ptr.size(), " elements; [batch, heads, seqlen_k + 1] needs ",
                  columns ? message(*columns) : "more than 2^63");
  if (parts.intervals.size() % 2 != 0)
    throw_invalid("intervals has ", parts.intervals.size(), " elements; it must be [n, 2], pairs of begin and end");
}

/// The column's intervals, clamped. Throws unless column_ptr says which they are.
void load_column(const MaskParts& parts, int64_t bh, int64_t j, std::vector<rules::Interval>& hidden) {
  const auto at = static_cast<std::size_t>(bh * (parts.seqlen_k + 1) + j);
  const int32_t first = parts.column_ptr[at], last = parts.column_ptr[at + 1];
  const auto count = static_cast<int64_t>(parts.intervals.size() / 2);
  if (first < 0 || first > last || last > count)
    throw_invalid("column_ptr of (batch ", bh / parts.heads, ", head ", bh % parts.heads, ", column ", j, ") is ",
                  first, " and the next one ", last, "; they must ascend within [0, ", count,
                  "], the number of intervals");
  const auto rows = static_cast<int32_t>(parts.seqlen_q);
  hidden.clear();
  for (auto n = static_cast<std::size_t>(first); n < static_cast<std::size_t>(last); ++n)
    hidden.push_back(
        {rules::clamp_row(parts.intervals[2 * n], rows), rules::clamp_row(parts.intervals[2 * n + 1], rows)});
}

}  // namespace

void settle_interval_lists(MaskParts& parts) {
  if (parts.column_ptr.empty()) {
    if (!parts.intervals.empty())
      throw_invalid("intervals has ", parts.intervals.size(), " elements and column_ptr none; they come together");
    return;
  }
  check_parts(parts);
  StoredColumns columns(parts.seqlen_q, parts.seqlen_k, parts.batch, parts.heads);
  std::vector<rules::Interval> hidden;
  for (int64_t bh = 0; bh < parts.batch * parts.heads; ++bh) {
    for (int64_t j = 0; j < parts.seqlen_k; ++j) {
      load_column(parts, bh, j, hidden);
      columns.append(hidden);
    }
  }
  const auto fit = try_fit(columns, Band::none(), 0, 2, Layout::kFewestIntervals);
  MaskParts settled = fit ? fit->parts() : list_parts(columns, Band::none(), 0);
  parts.column_ptr = std::move(settled.column_ptr);
  parts.intervals = std::move(settled.intervals);
  bool any = !parts.column_ptr.empty();
  for (const auto vector : kVectors) any |= !(parts.*vector = std::move(settled.*vector)).empty();
  // Keeps the batch entries and heads, which a mask without vectors has not.
  if (!any && parts.batch * parts.heads > 1)
    parts.lts.assign(static_cast<std::size_t>(columns.count()), static_cast<int32_t>(parts.seqlen_q));
}

void read_interval_lists(const MaskTensors& mask, MaskParts& parts) {
  const TensorView &ptr = mask.column_ptr, &intervals = mask.intervals;
  check_data("column_ptr", ptr);
  check_data("intervals", intervals);
  parts.batch = ptr.shape[0];
  parts.heads = ptr.shape[1];
  parts.column_ptr = room_for<int32_t>("column_ptr", ptr.num_elements());
  for (int64_t b = 0; b < ptr.shape[0]; ++b) {
    for (int64_t h = 0; h < ptr.shape[1]; ++h) {
      for (int64_t j = 0; j < ptr.shape[2]; ++j)
        parts.column_ptr.push_back(
            static_cast<const int32_t*>(ptr.data)[b * ptr.stride[0] + h * ptr.stride[1] + j * ptr.stride[2]]);
    }
  }
  parts.intervals = room_for<int32_t>("intervals", intervals.num_elements());
  for (int64_t n = 0; n < intervals.shape[0]; ++n) {
    for (int64_t end = 0; end < 2; ++end)
      parts.intervals.push_back(
          static_cast<const int32_t*>(intervals.data)[n * intervals.stride[0] + end * intervals.stride[1]]);
  }
}

}  // namespace flashmask
