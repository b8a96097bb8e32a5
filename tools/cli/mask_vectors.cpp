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

std::optional<StartEndRowIndices> smallest_form(const Mask& mask) {
  try {
    return to_startend_row_indices(mask.with_block_mask({}));
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kUnrepresentable) return std::nullopt;
    throw;
  }
}

MaskVectors from_form(const Mask& mask, StartEndRowIndices indices, int64_t batch, int64_t head) {
  MaskVectors result{.form = "startend_row_indices",
                     .meaning = {},
                     .causal = indices.causal,
                     .columns = indices.seqlen_k,
                     .names = form_names(indices.causal, indices.vectors)};
  const std::string band = indices.causal ? fmt::format("causal (key <= row + {})", mask.q_offset()) : "not causal";
  result.meaning = fmt::format("startend_row_indices [{}, {}, {}, {}], {}: hidden rows of each key column",
                               indices.batch, indices.heads, indices.seqlen_k, indices.vectors, band);
  const int64_t m =
      broadcast(batch, mask.batch(), indices.batch) * indices.heads + broadcast(head, mask.heads(), indices.heads);
  result.stride = indices.vectors;
  result.held = std::make_shared<const std::vector<int32_t>>(std::move(indices.values));
  for (std::size_t n = 0; n < result.names.size() && indices.seqlen_k > 0; ++n)
    result.vectors.push_back(result.held->data() + m * indices.seqlen_k * indices.vectors + n);
  return result;
}

std::string edge_text(const std::optional<int64_t>& edge) { return edge ? std::to_string(*edge) : "unbounded"; }

MaskVectors from_parts(const Mask& mask, int64_t batch, int64_t head) {
  MaskVectors result{.form = "band_and_intervals", .meaning = {}, .columns = mask.seqlen_k(), .names = {}};
  result.meaning = fmt::format(
      "no form of startend_row_indices says this; the mask's own parts: {} <= key - (row + {}) <= {} (an unbounded "
      "edge hides nothing), and hidden rows of each key column",
      edge_text(mask.band().lo), mask.q_offset(), edge_text(mask.band().hi));
  const MaskView& view = mask.view();
  const int64_t m = broadcast(batch, mask.batch(), view.bounds_batch) * view.bounds_heads +
                    broadcast(head, mask.heads(), view.bounds_heads);
  using Named = std::pair<const char*, std::span<const int32_t>>;
  for (const auto& [name, vector] :
       {Named{"LTS", mask.lts()}, Named{"LTE", mask.lte()}, Named{"UTS", mask.uts()}, Named{"UTE", mask.ute()}}) {
    if (vector.empty()) continue;
    const auto own =
        vector.subspan(static_cast<std::size_t>(m * view.seqlen_k), static_cast<std::size_t>(view.seqlen_k));
    result.names.emplace_back(name);
    result.vectors.push_back(own.data());
  }
  return result;
}

}  // namespace

MaskVectors mask_vectors(const Mask& mask, int64_t batch, int64_t head) {
  std::optional<StartEndRowIndices> indices = smallest_form(mask);
  return indices ? from_form(mask, *std::move(indices), batch, head) : from_parts(mask, batch, head);
}

void for_each_equal_run(const MaskVectors& vectors, const std::function<void(const VectorRun&)>& f) {
  if (vectors.vectors.empty()) return;
  const auto goes_on = [&](int64_t column) {
    const auto same = [&](const int32_t* v) { return v[column * vectors.stride] == v[(column - 1) * vectors.stride]; };
    return std::all_of(vectors.vectors.begin(), vectors.vectors.end(), same);
  };
  for (int64_t begin = 0, end = 0; begin < vectors.columns; begin = end) {
    for (end = begin + 1; end < vectors.columns && goes_on(end);) ++end;
    f({begin, end});
  }
}

}  // namespace flashmask::cli
