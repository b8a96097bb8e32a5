// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <functional>
#include <span>

#include "common/arithmetic.h"
#include "common/host_memory.h"
#include "common/message.h"
#include "common/tensor_checks.h"
#include "flashmask/mask.h"
#include "mask/hidden_columns.h"
#include "mask/host_only.h"
#include "mask/interval_lists.h"
#include "mask/mask_tensors.h"
#include "mask/vector_form.h"
#include "mask/view.h"

namespace flashmask {
namespace {

using rules::Interval;

/// The member of MaskParts for a MaskView's vector.
std::vector<int32_t> MaskParts::* in_parts(const int32_t* MaskView::* vector) {
  if (vector == &MaskView::lts) return &MaskParts::lts;
  if (vector == &MaskView::lte) return &MaskParts::lte;
  return vector == &MaskView::uts ? &MaskParts::uts : &MaskParts::ute;
}

/// The vectors of MaskParts in the order the indices give them.
std::vector<std::vector<int32_t> MaskParts::*> order_in_parts(bool causal, int64_t vectors) {
  std::vector<std::vector<int32_t> MaskParts::*> order;
  for (const auto vector : vector_order(causal, vectors)) {
    if (vector) order.push_back(in_parts(vector));
  }
  return order;
}

/// A fit in one of the forms of startend_row_indices.
struct FittedForm {
  bool causal;
  int64_t vectors;
  Fit fit;
};

/// At most one interval, in (lts, lte).
FittedForm causal_form(const Fit& fit) { return {true, fit.has(&MaskParts::lte) ? 2 : 1, fit}; }

/// The layout with the fewest vectors.
FittedForm plain_form(const Fit& fit) {
  return {false, fit.has(&MaskParts::lte) || fit.has(&MaskParts::uts) ? 4 : 2, fit};
}

/// The smallest form of a mask without a block mask.
FittedForm smallest_form(const HiddenColumns& columns) {
  const int64_t bottom_right = columns.seqlen_k() - columns.seqlen_q();  // the diagonal of `causal` in FlashMask's call
  if (columns.contains_outside_of(Band::causal(), bottom_right)) {
    if (const auto fit = try_fit(columns, Band::causal(), bottom_right, 1, Layout::kFewestIntervals))
      return causal_form(*fit);
  }
  const std::array none{Band::none()};
  return plain_form(fit_two_intervals(columns, none, bottom_right, "the mask without a band", Layout::kFewestVectors));
}

/// The form without its values.
StartEndRowIndices empty_indices(const HiddenColumns& columns, const FittedForm& form) {
  return {.causal = form.causal,
          .batch = columns.batch(),
          .heads = columns.heads(),
          .seqlen_k = columns.seqlen_k(),
          .vectors = form.vectors,
          .values = {}};
}

/// Calls take(values) for each column, with the values in the order of the form.
template <typename Take>
void for_each_column(const HiddenColumns& columns, const FittedForm& form, Take&& take) {
  const auto order = order_in_parts(form.causal, form.vectors);
  std::vector<int32_t> values(order.size());
  for (int64_t column = 0; column < columns.count(); ++column) {
    const ColumnBounds bounds = form.fit[column];
    for (std::size_t v = 0; v < order.size(); ++v) values[v] = bounds[number_of(order[v])];
    take(std::span<const int32_t>(values));
  }
}

StartEndRowIndices write(const HiddenColumns& columns, const FittedForm& form) {
  StartEndRowIndices out = empty_indices(columns, form);
  out.values.reserve(static_cast<std::size_t>(columns.count() * form.vectors));
  for_each_column(columns, form, [&out](std::span<const int32_t> values) {
    out.values.insert(out.values.end(), values.begin(), values.end());
  });
  return out;
}

void check_no_block_mask(const Mask& mask) {
  if (mask.has_block_mask()) {
    throw_unsupported(
        "startend_row_indices cannot hold a block mask: take mask.with_block_mask({}) and pass the block mask as its "
        "own argument");
  }
}

/// Runs of hidden rows of every column of a dense matrix, read row by row as it lies in memory.
class DenseReader {
 public:
  DenseReader(const uint8_t* data, int64_t row_stride, int64_t key_stride, int64_t seqlen_q, int64_t seqlen_k)
      : data_(data), row_stride_(row_stride), key_stride_(key_stride), seqlen_q_(seqlen_q), seqlen_k_(seqlen_k) {}

  void append_to(StoredColumns& columns) const {
    std::vector<int32_t> open(static_cast<std::size_t>(seqlen_k_), -1);  // first row of the run a column is in, or -1
    std::vector<std::vector<Interval>> runs(static_cast<std::size_t>(seqlen_k_));
    for (int64_t i = 0; i <= seqlen_q_; ++i) {
      for (std::size_t j = 0; j < open.size(); ++j) {
        const bool hidden = i < seqlen_q_ && data_[i * row_stride_ + static_cast<int64_t>(j) * key_stride_] == 0;
        if (hidden == (open[j] >= 0)) continue;
        if (!hidden) runs[j].push_back({open[j], static_cast<int32_t>(i)});
        open[j] = hidden ? static_cast<int32_t>(i) : -1;
      }
    }
    for (auto& run : runs) columns.append(run);
  }

 private:
  const uint8_t* data_;
  int64_t row_stride_, key_stride_, seqlen_q_, seqlen_k_;
};

StoredColumns read_dense(const TensorView& visible) {
  if ((visible.dtype != DataType::kBool && visible.dtype != DataType::kUInt8) ||
      (visible.rank != 2 && visible.rank != 4)) {
    throw_invalid("visible is ", describe(visible),
                  "; it must be bool or uint8, [seqlen_q, seqlen_k] or [batch, heads, seqlen_q, seqlen_k]");
  }
  const bool flat = visible.rank == 2;
  const std::size_t q = flat ? 0 : 2;
  const int64_t batch = flat ? 1 : visible.shape[0], heads = flat ? 1 : visible.shape[1];
  const int64_t seqlen_q = visible.shape[q], seqlen_k = visible.shape[q + 1];
  if (batch < 1 || heads < 1 || seqlen_q < 0 || seqlen_k < 0 || seqlen_q > kMaxSeqlen || seqlen_k > kMaxSeqlen)
    throw_invalid("visible is ", describe(visible), "; batch and heads must be at least 1, lengths between 0 and ",
                  kMaxSeqlen);
  check_extent("visible", visible);
  if (visible.device.kind != Device::Kind::kCpu)
    throw_invalid("visible is on a CUDA device; it is read here and must be in host memory");
  check_data("visible", visible);
  const bool empty = seqlen_q == 0 || seqlen_k == 0;
  StoredColumns columns(seqlen_q, seqlen_k, batch, heads);
  const auto* data = static_cast<const uint8_t*>(visible.data);
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t at = flat || empty ? 0 : b * visible.stride[0] + h * visible.stride[1];
      DenseReader(data + at, visible.stride[q], visible.stride[q + 1], seqlen_q, seqlen_k).append_to(columns);
    }
  }
  return columns;
}

/// The fewest intervals beside the tightest band.
Fit fit_dense(const HiddenColumns& columns) {
  const int64_t q_offset = columns.seqlen_k() - columns.seqlen_q();
  return fit_two_intervals(columns, columns.tightest_bands(q_offset), q_offset, "the dense mask");
}

}  // namespace

Mask from_interval_lists(const TensorView& column_ptr, const TensorView& intervals, int64_t seqlen_q,
                         std::optional<int64_t> q_offset) {
  if (column_ptr.rank != 3 || column_ptr.shape[2] < 1)
    throw_invalid("column_ptr is ", describe(column_ptr), "; it must be int32 [batch, heads, seqlen_k + 1]");
  const MaskTensors tensors{.seqlen_q = seqlen_q,
                            .seqlen_k = column_ptr.shape[2] - 1,
                            .q_offset = q_offset,
                            .column_ptr = column_ptr,
                            .intervals = intervals};
  const MaskView view = view_of(tensors);
  check_contents(tensors);
  if (column_ptr.device.kind != Device::Kind::kCpu) return Mask(view, Band::none(), q_offset);
  MaskParts parts{.seqlen_q = seqlen_q, .seqlen_k = tensors.seqlen_k, .q_offset = q_offset};
  read_interval_lists(tensors, parts);
  return Mask(std::move(parts));
}

Mask from_startend_row_indices(const TensorView& indices, bool causal, int64_t seqlen_q,
                               std::optional<int64_t> q_offset) {
  check_indices(indices, causal);  // for view_of an undefined tensor is a mask without vectors
  const Band band = causal ? Band::causal() : Band::none();
  const MaskTensors tensors{.seqlen_q = seqlen_q,
                            .seqlen_k = indices.shape[2],
                            .band = band,
                            .q_offset = q_offset,
                            .causal = causal,
                            .indices = indices};
  const MaskView view = view_of(tensors);
  check_contents(tensors);
  if (indices.device.kind != Device::Kind::kCpu) return Mask(view, band, q_offset);
  const auto [batch, heads, seqlen_k, vectors, unused] = indices.shape;
  const auto order = order_in_parts(causal, vectors);
  MaskParts parts{
      .seqlen_q = seqlen_q, .seqlen_k = seqlen_k, .band = band, .q_offset = q_offset, .batch = batch, .heads = heads};
  const auto* data = static_cast<const int32_t*>(indices.data);
  const int64_t columns = batch * heads * seqlen_k;
  for (std::size_t v = 0; v < order.size() && columns > 0; ++v) {
    std::vector<int32_t>& vector = parts.*order[v] = room_for<int32_t>("startend_row_indices", columns);
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t h = 0; h < heads; ++h) {
        const int32_t* row =
            data + b * indices.stride[0] + h * indices.stride[1] + static_cast<int64_t>(v) * indices.stride[3];
        for (int64_t j = 0; j < seqlen_k; ++j) vector.push_back(row[j * indices.stride[2]]);
      }
    }
  }
  return Mask(std::move(parts));
}

StartEndRowIndices to_startend_row_indices(const Mask& mask) {
  check_no_block_mask(mask);
  const MaskColumns columns(mask);
  return write(columns, smallest_form(columns));
}

StartEndRowIndices read_startend_row_indices(const Mask& mask,
                                             const std::function<void(std::span<const int32_t>)>& take) {
  check_no_block_mask(mask);
  const MaskColumns columns(mask);
  const FittedForm form = smallest_form(columns);
  for_each_column(columns, form, take);
  return empty_indices(columns, form);
}

Mask from_dense(const TensorView& visible) {
  const StoredColumns columns = read_dense(visible);
  const int64_t q_offset = columns.seqlen_k() - columns.seqlen_q();
  return Mask(fit_parts(columns, columns.tightest_bands(q_offset), q_offset));
}

VectorForm vector_form_from_dense(const TensorView& visible) {
  const StoredColumns columns = read_dense(visible);
  const Fit fit = fit_dense(columns);
  const MaskParts parts = fit.parts();
  const auto [lo, hi] = parts.band;
  VectorForm form{.seqlen_q = parts.seqlen_q};
  const bool causal = hi && parts.uts.empty() && parts.ute.empty();
  form.indices =
      write(columns, causal ? causal_form(fit)
                            : plain_form(*try_fit(columns, parts.band, *parts.q_offset, 2, Layout::kFewestVectors)));
  if (parts.lts.empty() && parts.lte.empty() && parts.uts.empty() && parts.ute.empty()) form.indices.vectors = 0;
  if (const int64_t edge = hi.value_or(lo.value_or(0))) form.q_offset = *parts.q_offset + edge;
  if (lo) form.window = {hi ? *hi - *lo : 0, hi ? 0 : -1};
  if (hi && !lo && !causal) form.window = {-1, 0};
  return form;
}

std::vector<uint8_t> to_dense(const Mask& mask) {
  const MaskView& view = mask.view();
  require_host(view, "to_dense");
  const auto size = checked_product(view.batch(), view.heads(), view.seqlen_q, view.seqlen_k);
  if (!size) throw_invalid("a dense matrix of this mask has more than 2^63 elements");
  auto dense = zeros<uint8_t>(message("a dense matrix of this mask, [", view.batch(), ", ", view.heads(), ", ",
                                      view.seqlen_q, ", ", view.seqlen_k, "],"),
                              *size);
  const int64_t key_blocks = ceil_div(view.seqlen_k, kBlockMaskSize);
  uint8_t* matrix = dense.data();
  for (int64_t b = 0; b < view.batch(); ++b) {
    for (int64_t h = 0; h < view.heads(); ++h, matrix += view.seqlen_q * view.seqlen_k) {
      const ColumnRows rows = column_rows(view, b, h);
      const uint8_t* keep = block_mask(view, b, h);
      const rules::PositionBand band = position_band(view, b);
      for (int64_t j = 0; j < view.seqlen_k; ++j) {
        for (int64_t i = 0; i < view.seqlen_q; ++i) {
          const bool kept = !keep || keep[(i / kBlockMaskSize) * key_blocks + j / kBlockMaskSize] != 0;
          const bool near = !band.q_pos || rules::in_band(band, band.q_pos[i], band.k_pos[j]);
          matrix[i * view.seqlen_k + j] = kept && near;
        }
        rows.for_each_hidden(static_cast<int32_t>(j), [&](rules::Interval hidden) {
          for (int64_t i = hidden.begin; i < hidden.end; ++i) matrix[i * view.seqlen_k + j] = 0;
        });
      }
    }
  }
  return dense;
}

}  // namespace flashmask
