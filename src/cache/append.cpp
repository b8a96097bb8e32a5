// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstdint>

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
void write_scales(const TensorView& from, const NewRow& row, const TensorView& to, const TensorView& scale,
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
                 const KeyPlace& at, bool writes_scales) {
  if (writes_scales) write_scales(from, row, to, scale, at);
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
  if (at.page < 0 || at.page >= a.call.pages) return;
  write_heads(a.k, row, a.call.cache.k, a.call.cache.k_scale, at, a.write_scales);
  write_heads(a.v, row, a.call.cache.v, a.call.cache.v_scale, at, a.write_scales);
  if (a.bounds.defined()) write_bounds(a, row, b, j, at);
}

/// Rows of a request become its last tokens.
void append_request(const AppendProblem& a, int64_t b) {
  const Sequence sequence(a.call, b);
  for (int64_t i = 0; i < sequence.rows().count; ++i) {
    const int64_t j = sequence.first_row() + i;
    const NewRow row{!a.call.is_packed(), b, sequence.rows().begin + i};
    if (j >= 0) write_row(a, row, b, j, sequence.place(j));
  }
}

/// Rows go to their slots.
void append_slots(const AppendProblem& a) {
  const bool has_batch = a.k.rank == 4;  // packed rows of requests, too, are numbered through
  const int64_t page_size = a.call.page_size;
  for (int64_t b = 0; b < (has_batch ? a.call.batch : 1); ++b) {
    for (int64_t i = 0; i < a.call.rows; ++i) {
      const NewRow row{has_batch, b, i};
      const int64_t slot = row.slot(a.slots);
      if (slot >= 0 && page_size > 0)
        write_row(a, row, slot / page_size, slot % page_size, {slot / page_size, slot % page_size});
    }
  }
}

}  // namespace

void Backend::append(const AppendProblem& a) const {
  if (a.slots.defined()) return append_slots(a);
  for (int64_t b = 0; b < a.call.batch; ++b) append_request(a, b);
}

}  // namespace flashmask
