// SPDX-License-Identifier: Apache-2.0
#include "cli/mask_vectors.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <span>
#include <utility>

#include "flashmask/status.h"

namespace flashmask::cli {
namespace {

std::vector<std::string> form_names(bool causal, int64_t vectors) {
  if (vectors == 1) return {"LTS"};
  if (vectors == 2) return causal ? std::vector<std::string>{"LTS", "LTE"} : std::vector<std::string>{"LTS", "UTE"};
  return {"LTS", "LTE", "UTS", "UTE"};
}

/// The index, of `own` entries, that entry `index` of `all` reads.
int64_t broadcast(int64_t index, int64_t all, int64_t own) { return index / (all / own); }

/// Nothing if no form of startend_row_indices holds the mask.
std::optional<MaskVectors> from_form(const Mask& mask, int64_t batch, int64_t head) {
  const Mask plain = mask.with_block_mask({});
  const int64_t m =
      broadcast(batch, mask.batch(), plain.batch()) * plain.heads() + broadcast(head, mask.heads(), plain.heads());
  const int64_t first = m * plain.seqlen_k(), end = first + plain.seqlen_k();
  VectorRuns runs;
  StartEndRowIndices form;
  try {
    form = read_startend_row_indices(plain, [&, column = int64_t{0}](std::span<const int32_t> values) mutable {
      if (column >= first && column < end) runs.append(values);
      ++column;
    });
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kUnrepresentable) return std::nullopt;
    throw;
  }
  const std::string band = form.causal ? fmt::format("causal (key <= row + {})", mask.q_offset()) : "not causal";
  return MaskVectors{.form = "startend_row_indices",
                     .meaning = fmt::format("startend_row_indices [{}, {}, {}, {}], {}: hidden rows of each key column",
                                            form.batch, form.heads, form.seqlen_k, form.vectors, band),
                     .causal = form.causal,
                     .columns = form.seqlen_k,
                     .names = form_names(form.causal, form.vectors),
                     .runs = std::move(runs)};
}

std::string edge_text(const std::optional<int64_t>& edge) { return edge ? std::to_string(*edge) : "unbounded"; }

MaskVectors from_parts(const Mask& mask, int64_t batch, int64_t head) {
  MaskVectors result{.form = "band_and_intervals", .meaning = {}, .columns = mask.seqlen_k(), .names = {}};
  result.meaning = fmt::format(
      "no form of startend_row_indices says this; the mask's own parts: {} <= key - (row + {}) <= {} (an unbounded "
      "edge hides nothing), and hidden rows of each key column",
      edge_text(mask.band().lo), mask.q_offset(), edge_text(mask.band().hi));
  if (mask.has_interval_lists()) result.meaning += fmt::format(", up to {} intervals in lists", mask.num_intervals());
  const MaskView& view = mask.view();
  const int64_t m = broadcast(batch, mask.batch(), view.bounds_batch) * view.bounds_heads +
                    broadcast(head, mask.heads(), view.bounds_heads);
  using Named = std::pair<const char*, std::span<const int32_t>>;
  std::vector<std::span<const int32_t>> vectors;
  for (const auto& [name, vector] :
       {Named{"LTS", mask.lts()}, Named{"LTE", mask.lte()}, Named{"UTS", mask.uts()}, Named{"UTE", mask.ute()}}) {
    if (vector.empty()) continue;
    result.names.emplace_back(name);
    vectors.push_back(
        vector.subspan(static_cast<std::size_t>(m * view.seqlen_k), static_cast<std::size_t>(view.seqlen_k)));
  }
  std::vector<int32_t> values(vectors.size());
  for (std::size_t j = 0; j < static_cast<std::size_t>(view.seqlen_k) && !vectors.empty(); ++j) {
    for (std::size_t n = 0; n < vectors.size(); ++n) values[n] = vectors[n][j];
    result.runs.append(values);
  }
  return result;
}

}  // namespace

void VectorRuns::append(std::span<const int32_t> values) {
  if (!last.empty() && std::ranges::equal(values, std::span(last.back().values).first(values.size()))) {
    ++last.back().end;
    if (count <= kFirst) ++first.back().end;
    return;
  }
  const int64_t column = last.empty() ? 0 : last.back().end;
  VectorRun run{.begin = column, .end = column + 1};
  std::ranges::copy(values, run.values.begin());
  if (++count <= kFirst) first.push_back(run);
  if (count > kLast) last.pop_front();
  last.push_back(run);
}

MaskVectors mask_vectors(const Mask& mask, int64_t batch, int64_t head) {
  std::optional<MaskVectors> in_form = from_form(mask, batch, head);
  return in_form ? *std::move(in_form) : from_parts(mask, batch, head);
}

}  // namespace flashmask::cli
