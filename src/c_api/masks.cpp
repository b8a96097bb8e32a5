// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <initializer_list>
#include <span>
#include <tuple>
#include <vector>

#include "c_api/read.h"
#include "c_api/write_mask.h"
#include "common/arithmetic.h"
#include "common/tensor_checks.h"
#include "flashmask/inspect.h"
#include "inspect/element_counts.h"
#include "mask/vector_form.h"
#include "mask/view.h"

namespace flashmask::c_api {
namespace {

bool is_contiguous(const TensorView& t, const std::array<int64_t, TensorView::kMaxRank>& shape) {
  return t.stride == TensorView::contiguous(nullptr, t.dtype, {shape[0], shape[1], shape[2], shape[3]}).stride;
}

void write_dense(const fm_mask* mask, const fm_tensor* visible) {
  const CallMask of(mask, {});
  const MaskView& shapes = of.view();
  const TensorView out = tensor(required(visible, "visible"), "visible");
  const auto refuse = [&] {
    throw_invalid("visible is ", describe(out), "; it must be bool or uint8, contiguous, [", shapes.batch(), ", ",
                  shapes.heads(), ", ", shapes.seqlen_q, ", ", shapes.seqlen_k, "]");
  };
  const std::array<int64_t, TensorView::kMaxRank> shape{shapes.batch(), shapes.heads(), shapes.seqlen_q,
                                                        shapes.seqlen_k};
  if ((out.dtype != DataType::kBool && out.dtype != DataType::kUInt8) || out.rank != 4 || out.shape != shape) refuse();
  check_extent("visible", out);
  if (out.num_elements() == 0) return;
  if (!is_contiguous(out, shape)) refuse();
  check_data("visible", out);
  const std::vector<uint8_t> dense = to_dense(of.copy());
  std::memcpy(out.data, dense.data(), dense.size());
}

/// The room for a mask's vectors that `out` brings, checked before there is anything to write.
class MaskOut {
 public:
  MaskOut(fm_mask* out, int64_t batch, int64_t heads, int64_t seqlen_k) : to_(out), mask_(read_struct(out, "out")) {
    if (mask_.struct_size < offsetof(fm_mask, block_mask))
      throw_invalid("out->struct_size is ", mask_.struct_size, "; the struct must reach beyond bounds");
    const TensorView room = tensor(mask_.bounds, "out->bounds");
    const std::array<int64_t, TensorView::kMaxRank> shape{batch, heads, seqlen_k, 4};
    // Without columns a mask has no entries and heads of its own.
    const bool fits = room.dtype == DataType::kInt32 && room.rank == 4 &&
                      (room.shape == shape || (seqlen_k == 0 && room.shape[2] == 0));
    if (fits) check_extent("out->bounds", room);
    if (!fits || (room.num_elements() > 0 && !is_contiguous(room, shape)))
      throw_invalid("out->bounds is ", describe(room), "; it must be int32, contiguous, [", batch, ", ", heads, ", ",
                    seqlen_k, ", 4]");
    check_data("out->bounds", room);
  }

  /// Takes the other tensors from `rest`.
  void write(const VectorForm& form, const fm_mask& rest = {}) {
    const fm_tensor room = mask_.bounds;
    const StartEndRowIndices& indices = form.indices;
    fm_mask mask{};
    mask.struct_size = mask_.struct_size;
    mask.seqlen_q = form.seqlen_q;
    mask.seqlen_k = indices.seqlen_k;
    mask.block_mask = rest.block_mask;
    mask.q_pos = rest.q_pos;
    mask.k_pos = rest.k_pos;
    mask.column_ptr = rest.column_ptr;
    mask.intervals = rest.intervals;
    if (indices.causal) mask.flags |= FM_CAUSAL;
    if (form.q_offset) mask.flags |= FM_HAS_Q_OFFSET, mask.q_offset = *form.q_offset;
    if (form.window) {
      mask.flags |= FM_HAS_WINDOW;
      std::tie(mask.window_left, mask.window_right) = *form.window;
    }
    if (indices.vectors > 0) {
      mask.bounds = room;
      mask.bounds.shape[3] = indices.vectors;
      for (int d = 2; d >= 0; --d)
        mask.bounds.stride[d] = mask.bounds.stride[d + 1] * std::max<int64_t>(mask.bounds.shape[d + 1], 1);
      std::copy(indices.values.begin(), indices.values.end(), static_cast<int32_t*>(room.data));
    }
    write_struct(mask, to_);
  }

 private:
  fm_mask* to_;
  fm_mask mask_;
};

void write_startend(const fm_mask* from, fm_mask* out) {
  const CallMask of(from, {});
  const MaskView& shapes = of.view();
  MaskOut room(out, shapes.bounds_batch, shapes.bounds_heads, shapes.seqlen_k);
  room.write({.seqlen_q = shapes.seqlen_q, .indices = to_startend_row_indices(of.copy())});
}

std::vector<RowSegment> read_segments(const int64_t* pairs, int64_t count, const char* argument) {
  if (count < 0) throw_invalid(argument, " are ", count, "; there must be 0 or more");
  if (count > 0) required(pairs, argument);
  std::vector<RowSegment> segments;
  for (int64_t n = 0; n < count; ++n) segments.push_back({pairs[2 * n], pairs[2 * n + 1]});
  return segments;
}

/// Lays `values` into the room that `to` brings and makes it a tensor of `shape`; absent if there are none.
template <typename Value>
void write_values(std::span<const Value> values, DataType dtype, std::initializer_list<int64_t> shape, fm_tensor& to,
                  const char* argument) {
  const TensorView room = tensor(to, argument), wanted = TensorView::contiguous(nullptr, dtype, shape);
  to = {};
  if (values.empty()) return;
  if (room.defined()) check_extent(argument, room);
  if (room.dtype != dtype || room.rank != wanted.rank || room.shape != wanted.shape || room.stride != wanted.stride)
    throw_invalid(argument, " is ", describe(room), "; it must be contiguous, ", describe(wanted));
  check_data(argument, room);
  std::copy(values.begin(), values.end(), static_cast<Value*>(room.data));
  to.data = room.data;
  to.dtype = static_cast<int32_t>(dtype);
  to.ndim = room.rank;
  std::copy_n(room.shape.begin(), room.rank, to.shape);
  std::copy_n(room.stride.begin(), room.rank, to.stride);
}

/// The intervals of a mask as the vectors of an fm_mask without FM_CAUSAL.
VectorForm vector_form_of(const Mask& mask) {
  const MaskView& view = mask.view();
  const auto rows = static_cast<int32_t>(view.seqlen_q);
  VectorForm form{.seqlen_q = view.seqlen_q};
  form.indices = {
      .batch = view.bounds_batch, .heads = view.bounds_heads, .seqlen_k = view.seqlen_k, .vectors = 0, .values = {}};
  const Band& band = mask.band();
  if (band.lo && band.hi && *band.lo > *band.hi) {  // lets nothing through, which no window says
    form.indices.vectors = 2;
    form.indices.values.assign(static_cast<std::size_t>(2 * view.bounds_batch * view.bounds_heads * view.seqlen_k), 0);
    return form;
  }
  if (!band.unbounded()) {
    // A window is around the row's own position: where the band does not see it, it is put on the band's edge.
    const int64_t shift = std::min<int64_t>(band.hi.value_or(0), 0) + std::max<int64_t>(band.lo.value_or(0), 0);
    if (shift != 0 && view.has_positions)
      throw_unsupported("the band over positions does not see a row's own, which an fm_mask cannot say");
    form.window = {band.lo ? shift - *band.lo : -1, band.hi ? *band.hi - shift : -1};
    if (!view.has_positions) form.q_offset = mask.q_offset() + shift;
  }
  if (mask.num_intervals() == 0 || mask.has_interval_lists()) return form;
  const auto lts = mask.lts(), lte = mask.lte(), uts = mask.uts(), ute = mask.ute();
  const bool is_pair = lte.empty() && uts.empty(), has_first = !lts.empty() || !lte.empty(),
             has_second = !uts.empty() || !ute.empty();
  form.indices.vectors = is_pair ? 2 : 4;
  const auto at = [](std::span<const int32_t> vector, std::size_t n, int32_t otherwise) {
    return vector.empty() ? otherwise : vector[n];
  };
  for (std::size_t n = 0; n < static_cast<std::size_t>(view.bounds_batch * view.bounds_heads * view.seqlen_k); ++n) {
    std::vector<int32_t>& values = form.indices.values;
    values.push_back(at(lts, n, has_first ? 0 : rows));
    if (!is_pair) {
      values.push_back(at(lte, n, rows));
      values.push_back(at(uts, n, has_second ? 0 : rows));
    }
    values.push_back(at(ute, n, has_second ? rows : 0));
  }
  return form;
}

/// The batch or head count of room for `own`: the room's, if `own` broadcasts to it; otherwise `own`.
int64_t count_in_room(const fm_tensor& room, int dimension, int64_t own) {
  const int64_t count = room.ndim > dimension ? room.shape[dimension] : own;
  return count > 0 && own > 0 && count % own == 0 && count <= kMaxSeqlen ? count : own;
}

/// Broadcasts `values` from [own_batch, own_heads, ...] to [batch, heads, ...].
template <typename Value>
std::vector<Value> broadcast(std::span<const Value> values, int64_t own_batch, int64_t own_heads, int64_t batch,
                             int64_t heads) {
  if (own_batch == batch && own_heads == heads) return {values.begin(), values.end()};
  const auto size = values.size() / static_cast<std::size_t>(own_batch * own_heads);
  std::vector<Value> all;
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t own = broadcast_index(b, batch, own_batch) * own_heads + broadcast_index(h, heads, own_heads);
      const auto one = values.subspan(static_cast<std::size_t>(own) * size, size);
      all.insert(all.end(), one.begin(), one.end());
    }
  }
  return all;
}

/// write_values, to as many batch entries and heads as the room has.
template <typename Value>
void write_broadcast(std::span<const Value> values, DataType dtype, int64_t own_batch, int64_t own_heads, int64_t rows,
                     int64_t keys, fm_tensor& to, const char* argument) {
  const int64_t batch = count_in_room(to, 0, own_batch), heads = count_in_room(to, 1, own_heads);
  const std::vector<Value> all = broadcast(values, own_batch, own_heads, batch, heads);
  write_values<Value>(all, dtype, {batch, heads, rows, keys}, to, argument);
}
void write_positions(std::span<const int32_t> values, int64_t own_batch, int64_t length, fm_tensor& to,
                     const char* argument) {
  const int64_t batch = count_in_room(to, 0, own_batch);
  write_values<int32_t>(broadcast(values, own_batch, 1, batch, 1), DataType::kInt32, {batch, length}, to, argument);
}

/// Throws kUnrepresentable, naming the first column that has more than two intervals.
void refuse_lists(const Mask& mask, const char* what) {
  const MaskView& view = mask.view();
  const auto ptr = mask.column_ptr();
  for (std::size_t n = 1; n < ptr.size(); ++n) {
    if (ptr[n] - ptr[n - 1] <= 2) continue;
    const auto column = static_cast<int64_t>(n) - 1, in_row = view.seqlen_k + 1;
    throw Error(ErrorCode::kUnrepresentable,
                message(what, " does not fit two row intervals per key column: (batch ",
                        column / in_row / view.bounds_heads, ", head ", column / in_row % view.bounds_heads,
                        ", column ", column % in_row, ") needs ", ptr[n] - ptr[n - 1]),
                column % in_row);
  }
}

/// Writes a mask's interval lists, or how many intervals they have if the room is not for that number.
void write_lists(const Mask& mask, int64_t batch, int64_t heads, fm_mask& to) {
  const MaskView& view = mask.view();
  const auto intervals = mask.intervals();
  const auto count = static_cast<int64_t>(intervals.size()) / 2;
  write_values<int32_t>(broadcast(mask.column_ptr(), view.bounds_batch, view.bounds_heads, batch, heads),
                        DataType::kInt32, {batch, heads, view.seqlen_k + 1}, to.column_ptr, "out->column_ptr");
  if (to.intervals.dtype != FM_NONE && to.intervals.shape[0] == count)
    return write_values<int32_t>(intervals, DataType::kInt32, {count, 2}, to.intervals, "out->intervals");
  to.intervals = {.data = nullptr, .dtype = FM_INT32, .ndim = 2, .shape = {count, 2}, .stride = {2, 1}};
}

}  // namespace

bool takes_lists(const fm_mask* out) { return read_struct(out, "out").column_ptr.dtype != FM_NONE; }

void write_mask(const Mask& mask, fm_mask* out, const char* what) {
  const MaskView& view = mask.view();
  fm_mask rest = read_struct(out, "out");
  const int64_t batch = count_in_room(rest.bounds, 0, view.bounds_batch),
                heads = count_in_room(rest.bounds, 1, view.bounds_heads);
  MaskOut room(out, batch, heads, view.seqlen_k);
  write_broadcast(mask.block_mask(), DataType::kUInt8, view.block_batch, view.block_heads,
                  ceil_div(view.seqlen_q, kBlockMaskSize), ceil_div(view.seqlen_k, kBlockMaskSize), rest.block_mask,
                  "out->block_mask");
  write_positions(mask.q_pos(), view.q_pos_batch, view.seqlen_q, rest.q_pos, "out->q_pos");
  write_positions(mask.k_pos(), view.k_pos_batch, view.seqlen_k, rest.k_pos, "out->k_pos");
  VectorForm form = vector_form_of(mask);
  if (mask.has_interval_lists() && form.indices.vectors == 0) {
    if (!takes_lists(out)) refuse_lists(mask, what);
    write_lists(mask, batch, heads, rest);
  } else {
    rest.column_ptr = rest.intervals = {};
  }
  form.indices.values = broadcast<int32_t>(form.indices.values, view.bounds_batch, view.bounds_heads, batch, heads);
  room.write(form, rest);
}

namespace {

void write_from_dense(const fm_tensor* from, fm_mask* out) {
  const TensorView visible = tensor(required(from, "visible"), "visible");
  if (visible.rank != 4)
    throw_invalid("visible is ", describe(visible), "; it must be bool or uint8 [batch, heads, seqlen_q, seqlen_k]");
  if (takes_lists(out)) return write_mask(from_dense(visible), out, "the dense mask");
  MaskOut room(out, visible.shape[0], visible.shape[1], visible.shape[3]);
  room.write(vector_form_from_dense(visible));
}

void write_gathered(const fm_mask* from, const fm_segments* given, fm_mask* out) {
  const auto segments = read_struct(given, "segments");
  if (segments.reserved) throw_unsupported("segments->reserved is ", segments.reserved, "; it must be zero");
  const Mask mask =
      gather(CallMask(from, {}).copy(), read_segments(segments.rows, segments.row_count, "segments->rows"),
             read_segments(segments.keys, segments.key_count, "segments->keys"));
  write_mask(mask, out, "the gathered mask");
}

void write_intersection(const fm_mask* a, const fm_mask* b, fm_mask* out) {
  write_mask(intersect(CallMask(&required(a, "a"), {}).copy(), CallMask(&required(b, "b"), {}).copy()), out,
             "the intersection");
}

void write_concatenation(const fm_mask* const* pieces, int64_t count, fm_mask* out) {
  if (count < 0) throw_invalid("count is ", count, "; there must be 0 or more pieces");
  if (count > 0) required(pieces, "pieces");
  std::vector<Mask> all;
  for (int64_t n = 0; n < count; ++n) all.push_back(CallMask(&required(pieces[n], "a piece"), {}).copy());
  write_mask(concatenate(all), out, "the concatenation");
}

void write_statistics(const fm_mask* from, fm_statistics* to) {
  auto out = read_struct(to, "out");
  if (out.reserved) throw_unsupported("out->reserved is ", out.reserved, "; it must be zero");
  const TileShape otherwise;
  const TileShape tile{.rows = out.tile_rows ? out.tile_rows : otherwise.rows,
                       .keys = out.tile_keys ? out.tile_keys : otherwise.keys};
  const MaskStatistics sums = statistics(CallMask(from, {}).copy(), tile);
  out.elements = sums.elements;
  out.visible = sums.visible;
  out.tiles = sums.tiles;
  out.full_tiles = sums.full_tiles;
  out.partial_tiles = sums.partial_tiles;
  write_struct(out, to);
}

void count_cells(const fm_mask* from, const fm_cells* into) {
  const auto cells = read_struct(into, "cells");
  if (cells.reserved) throw_unsupported("cells->reserved is ", cells.reserved, "; it must be zero");
  CallMask mask(from, {});
  const MaskView& shapes = mask.view();
  check_entry(shapes, cells.batch, cells.head);
  if (cells.row_step < 1 || cells.key_step < 1 || cells.most_keys < 0)
    throw_invalid("cells are ", cells.row_step, "x", cells.key_step, " and most_keys is ", cells.most_keys,
                  "; both sides must be at least 1, most_keys at least 0");
  const int64_t in_row = ceil_div(shapes.seqlen_k, cells.key_step);
  const auto count = checked_product(ceil_div(shapes.seqlen_q, cells.row_step), in_row);
  if (!count || cells.count < *count)
    throw_invalid("cells->count is ", cells.count, "; the mask has ", ceil_div(shapes.seqlen_q, cells.row_step), " x ",
                  in_row, " cells");
  if (*count == 0) return;
  required(cells.visible, "cells->visible");
  const Partition rows(shapes.seqlen_q, cells.row_step);
  for_each_visible_column(mask.contents(),
                          {.batch = cells.batch,
                           .head = cells.head,
                           .row_step = cells.row_step,
                           .key_step = cells.key_step,
                           .most_keys = cells.most_keys},
                          [&](int64_t key_cell, int64_t keys, std::span<const int64_t> visible) {
                            for (int64_t r = 0; r < rows.parts(); ++r) {
                              cells.visible[r * in_row + key_cell] = visible[static_cast<std::size_t>(r)];
                              if (cells.elements) cells.elements[r * in_row + key_cell] = rows.size(r) * keys;
                            }
                          });
}

}  // namespace
}  // namespace flashmask::c_api

using namespace flashmask::c_api;

fm_status fm_mask_to_dense(const fm_mask* mask, const fm_tensor* visible) {
  return guarded([&] { write_dense(mask, visible); });
}

fm_status fm_mask_from_dense(const fm_tensor* visible, fm_mask* out) {
  return guarded([&] { write_from_dense(visible, out); });
}

fm_status fm_mask_to_startend(const fm_mask* mask, fm_mask* out) {
  return guarded([&] { write_startend(mask, out); });
}

fm_status fm_mask_gather(const fm_mask* mask, const fm_segments* segments, fm_mask* out) {
  return guarded([&] { write_gathered(mask, segments, out); });
}

fm_status fm_mask_intersect(const fm_mask* a, const fm_mask* b, fm_mask* out) {
  return guarded([&] { write_intersection(a, b, out); });
}

fm_status fm_mask_concatenate(const fm_mask* const* pieces, int64_t count, fm_mask* out) {
  return guarded([&] { write_concatenation(pieces, count, out); });
}

fm_status fm_mask_statistics(const fm_mask* mask, fm_statistics* out) {
  return guarded([&] { write_statistics(mask, out); });
}

fm_status fm_mask_count_cells(const fm_mask* mask, const fm_cells* cells) {
  return guarded([&] { count_cells(mask, cells); });
}
