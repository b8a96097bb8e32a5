// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <optional>
#include <utility>
#include <vector>

#include "mask/families/contents.h"
#include "mask/families/families.h"
#include "mask/families/host_run.h"
#include "mask/hidden_columns.h"

namespace flashmask::build {
namespace {

/// Makes `hidden` all rows but the visible ones, which are sorted here.
void hide_others(std::vector<rules::Interval>& visible, int32_t rows, std::vector<rules::Interval>& hidden) {
  std::ranges::sort(visible, {}, &rules::Interval::begin);
  hidden.clear();
  int32_t reached = 0;
  for (const rules::Interval seen : visible) {
    if (seen.begin > reached) hidden.push_back({reached, seen.begin});
    reached = std::max(reached, seen.end);
  }
  if (reached < rows) hidden.push_back({reached, rows});
}

/// The mask of the rows that visible_rows tells: in vectors if these say it, otherwise in interval lists.
template <typename VisibleRows>
Mask mask_of(const Shape& shape, const VisibleRows& visible_rows) {
  const auto rows = static_cast<int32_t>(shape.seqlen_q);
  StoredColumns columns(shape.seqlen_q, shape.seqlen_k, shape.batch, shape.heads);
  std::vector<rules::Interval> visible, hidden;
  each_lead({shape.batch, shape.heads}, [&](const Lead& lead) {
    for (int64_t j = 0; j < shape.seqlen_k; ++j) {
      visible.clear();
      visible_rows(lead, j, [&](int64_t begin, int64_t end) {
        if (begin >= end) return;
        if (!visible.empty() && visible.back().end == begin)
          visible.back().end = row_of(end, rows);
        else
          visible.push_back({row_of(begin, rows), row_of(end, rows)});
      });
      hide_others(visible, rows, hidden);
      columns.append(hidden);
    }
  });
  const std::array bands{shape.band};
  return Mask(fit_parts(columns, bands, shape.q_offset.value_or(shape.seqlen_k - shape.seqlen_q)));
}

Mask build_lists(HostRun& run, const Arguments& a) {
  std::optional<Mask> mask;
  with_family(*a.family, [&](auto own) {
    if constexpr (requires { own.visible_rows(run, a); }) mask = mask_of(a.shape, own.visible_rows(run, a));
  });
  return std::move(*mask);
}

}  // namespace

Mask build_mask(std::string_view family, const std::vector<Parameter>& parameters) {
  const Arguments a = read_arguments(family, parameters, {});
  check_contents(a);
  const Shape& shape = a.shape;
  HostRun run({shape.batch, shape.heads});
  if (shape.form.is_listed()) return build_lists(run, a);
  MaskParts parts{.seqlen_q = shape.seqlen_q,
                  .seqlen_k = shape.seqlen_k,
                  .band = shape.band,
                  .q_offset = shape.q_offset,
                  .batch = shape.batch,
                  .heads = shape.heads};
  if (shape.form.has_positions) {
    parts.position_batch = shape.batch;
    parts.q_pos.resize(static_cast<std::size_t>(shape.batch * shape.seqlen_k));
  }
  const auto vector = [&](uint32_t which, std::vector<int32_t>& entries) -> int32_t* {
    if (!(shape.form.vectors & which)) return nullptr;
    entries.resize(static_cast<std::size_t>(shape.batch * shape.heads * shape.seqlen_k));
    return entries.data();
  };
  const VectorOutput vectors{vector(kLts, parts.lts), vector(kLte, parts.lte), vector(kUts, parts.uts),
                             vector(kUte, parts.ute)};
  const Output output{vectors, parts.q_pos.data()};
  if (!shape.form.has_lists)
    build_on_host(a, output);
  else if (!write_vectors(run, a, output))
    return build_lists(run, a);
  parts.k_pos = parts.q_pos;
  return Mask(std::move(parts));
}

}  // namespace flashmask::build
