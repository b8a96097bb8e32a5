// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <vector>

#include "cache/page_scale.h"
#include "cache/sequence.h"
#include "cache/token_scale.h"
#include "call/backend.h"
#include "common/element.h"

namespace flashmask {
namespace {

/// Element of a tensor by its first three indices and one more.
int64_t offset(const TensorView& t, int64_t a, int64_t b, int64_t c, int64_t d) {
  return a * t.stride[0] + b * t.stride[1] + c * t.stride[2] + d * t.stride[3];
}

/// A row to be written: in batch entry b its row i, or with three dimensions row i alone.
struct NewRow {
  bool has_batch;
  int64_t b, i;
  int64_t at(const TensorView& t, int64_t c, int64_t d) const {
    return has_batch ? offset(t, b, i, c, d) : i * t.stride[0] + c * t.stride[1] + d * t.stride[2];
  }
  int64_t slot(const TensorView& t) const {
    const int64_t at = has_batch ? b * t.stride[0] + i * t.stride[1] : i * t.stride[0];
    return t.dtype == DataType::kInt64 ? static_cast<const int64_t*>(t.data)[at]
                                       : static_cast<const int32_t*>(t.data)[at];
  }
};

int64_t scale_offset(const TensorView& scale, const KeyPlace& at, int64_t hk) {
  return at.page * scale.stride[0] + at.slot * scale.stride[1] + hk * scale.stride[2];
}
double scale_at(const TensorView& scale, const KeyPlace& at, int64_t hk) {
  return scale.defined() ? load_element(scale, scale_offset(scale, at, hk)) : 1.0;
}

/// Writes the scales of a token.
void write_token_scales(const TensorView& from, const NewRow& row, const TensorView& to, const TensorView& scale,
                        const KeyPlace& at) {
  const int64_t heads = to.shape[2], sharing = scale.stride[2] == 0 ? heads : 1;
  for (int64_t first = 0; first < heads; first += sharing) {
    double largest = 0;
    for (int64_t h = first; h < first + sharing; ++h) {
      for (int64_t c = 0; c < to.shape[3]; ++c)
        largest = std::fmax(largest, std::fabs(load_element(from, row.at(from, h, c))));
    }
    static_cast<float*>(scale.data)[scale_offset(scale, at, first)] = token_scale(largest);
  }
}

void write_heads(const TensorView& from, const NewRow& row, const TensorView& to, const TensorView& scale,
                 const KeyPlace& at, WrittenScales written) {
  if (written == WrittenScales::kOfTokens) write_token_scales(from, row, to, scale, at);
  TensorView typed = to;
  if (typed.dtype == DataType::kUInt8) typed.dtype = DataType::kFloat8E4M3;
  for (int64_t h = 0; h < to.shape[2]; ++h) {
    const double factor = scale_at(scale, at, h);
    for (int64_t c = 0; c < to.shape[3]; ++c)
      store_element(typed, offset(to, at.page, at.slot, h, c), load_element(from, row.at(from, h, c)) / factor);
  }
}

/// Writes a row's vectors to where the mask has those of its key: token j of request b, which lies at `at`.
void write_bounds(const AppendProblem& a, const NewRow& row, int64_t b, int64_t j, const KeyPlace& at) {
  const TensorView& to = a.call.mask.bounds;
  const bool in_pages = a.call.mask.key_layout == KeyLayout::kPages;
  if (!in_pages && j >= to.shape[2]) return;
  const int64_t entry = to.shape[0] == 1 ? 0 : b;
  for (int64_t h = 0; h < to.shape[in_pages ? 2 : 1]; ++h) {
    for (int64_t n = 0; n < to.shape[3]; ++n) {
      const int64_t place = in_pages ? offset(to, at.page, at.slot, h, n) : offset(to, entry, h, j, n);
      static_cast<int32_t*>(to.data)[place] = static_cast<const int32_t*>(a.bounds.data)[row.at(a.bounds, h, n)];
    }
  }
}

void write_row(const AppendProblem& a, const NewRow& row, int64_t b, int64_t j, const KeyPlace& at) {
  write_heads(a.k, row, a.call.cache.k, a.call.cache.k_scale, at, a.k_scales);
  write_heads(a.v, row, a.call.cache.v, a.call.cache.v_scale, at, a.v_scales);
  if (a.bounds.defined()) write_bounds(a, row, b, j, at);
}

/// Calls visit(row, b, j, at) for each row that has a place: token j of request b, which lies at `at`.
template <typename Visit>
void for_each_row(const AppendProblem& a, const Visit& visit) {
  const bool has_batch = a.k.rank == 4;  // packed rows of requests, too, are numbered through where they have slots
  const int64_t page_size = a.call.page_size;
  const auto visit_if_there = [&](const NewRow& row, int64_t b, int64_t j, const KeyPlace& at) {
    if (at.page >= 0 && at.page < a.call.pages) visit(row, b, j, at);
  };
  if (a.slots.defined()) {
    for (int64_t b = 0; b < (has_batch ? a.call.batch : 1); ++b) {
      for (int64_t i = 0; i < a.call.rows; ++i) {
        const NewRow row{has_batch, b, i};
        const int64_t slot = row.slot(a.slots);
        if (slot >= 0 && page_size > 0)
          visit_if_there(row, slot / page_size, slot % page_size, {slot / page_size, slot % page_size});
      }
    }
    return;
  }
  for (int64_t b = 0; b < a.call.batch; ++b) {
    const Sequence sequence(a.call, b);
    for (int64_t i = 0; i < sequence.rows().count; ++i) {
      const int64_t j = sequence.first_row() + i;
      if (j >= 0) visit_if_there({!a.call.is_packed(), b, sequence.rows().begin + i}, b, j, sequence.place(j));
    }
  }
}

/// The new rows of a page, as its scales see them.
struct PageRows {
  bool begins = false;       ///< one has the page's first slot
  int64_t stored_slots = 0;  ///< slots that may hold tokens of earlier calls
  std::vector<double> k, v;  ///< the largest finite magnitude by head
};

void raise_largest(std::vector<double>& largest, const TensorView& from, const NewRow& row, const TensorView& to) {
  largest.resize(static_cast<std::size_t>(to.shape[2]));
  for (int64_t h = 0; h < to.shape[2]; ++h) {
    double& of_head = largest[static_cast<std::size_t>(h)];
    for (int64_t c = 0; c < to.shape[3]; ++c)
      of_head = std::max(of_head, finite_magnitude(load_element(from, row.at(from, h, c))));
  }
}

std::map<int64_t, PageRows> rows_by_page(const AppendProblem& a) {
  std::map<int64_t, PageRows> pages;
  for_each_row(a, [&](const NewRow& row, int64_t, int64_t, const KeyPlace& at) {
    // The rows of a sequence come in ascending order, and those with slots in any.
    const auto [found, is_first] = pages.try_emplace(at.page);
    PageRows& page = found->second;
    if (is_first) page.stored_slots = a.slots.defined() ? a.call.page_size : at.slot;
    page.begins |= at.slot == 0;
    raise_largest(page.k, a.k, row, a.call.cache.k);
    raise_largest(page.v, a.v, row, a.call.cache.v);
  });
  return pages;
}

/// Raises the scales of a page to what its new rows need, and brings what it holds to them.
void raise_page_scales(const TensorView& to, const TensorView& scale, int64_t page, const PageRows& rows,
                       const std::vector<double>& largest) {
  const int64_t heads = to.shape[2], sharing = scale.stride[2] == 0 ? heads : 1;
  auto* const stored = static_cast<uint8_t*>(to.data);
  for (int64_t first = 0; first < heads; first += sharing) {
    float& own = static_cast<float*>(scale.data)[scale_offset(scale, {page, 0}, first)];
    const auto* const of_head = largest.data() + first;
    const PageScale grown = grown_page_scale(own, rows.begins, *std::max_element(of_head, of_head + sharing));
    own = grown.scale;
    if (grown.halvings == 0) continue;
    for (int64_t slot = 0; slot < rows.stored_slots; ++slot) {
      for (int64_t h = first; h < first + sharing; ++h) {
        for (int64_t c = 0; c < to.shape[3]; ++c) {
          uint8_t& number = stored[offset(to, page, slot, h, c)];
          number = halved_e4m3(number, grown.halvings);
        }
      }
    }
  }
}

}  // namespace

void Backend::append(const AppendProblem& a) const {
  const bool k_of_pages = a.k_scales == WrittenScales::kOfPages, v_of_pages = a.v_scales == WrittenScales::kOfPages;
  if (k_of_pages || v_of_pages) {
    for (const auto& [page, rows] : rows_by_page(a)) {
      if (k_of_pages) raise_page_scales(a.call.cache.k, a.call.cache.k_scale, page, rows, rows.k);
      if (v_of_pages) raise_page_scales(a.call.cache.v, a.call.cache.v_scale, page, rows, rows.v);
    }
  }
  for_each_row(a, [&](const NewRow& row, int64_t b, int64_t j, const KeyPlace& at) { write_row(a, row, b, j, at); });
}

}  // namespace flashmask
