// SPDX-License-Identifier: Apache-2.0
#include "mask/mask_tensors.h"

#include <algorithm>

#include "common/arithmetic.h"
#include "common/message.h"
#include "common/tensor_checks.h"
#include "mask/content_hash.h"
#include "mask/host_only.h"
#include "mask/view.h"

namespace flashmask {
namespace {

constexpr const char* kForms =
    "accepted: causal with 1 vector (LTS) or 2 (LTS, LTE); not causal with 2 (LTS, UTE) or 4 (LTS, LTE, UTS, UTE)";

/// Far beyond any sequence, and small enough that sums of a few never overflow.
constexpr int64_t kFarthest = int64_t{1} << 40;

void check_count(const char* argument, int64_t count) {
  if (count < 1) throw_invalid(argument, " is ", count, "; it must be at least 1 (1 is broadcast)");
}

/// The same band with edges that sums do not make overflow: |j - (i + q_offset)| is below 2^41 whatever the q_offset,
/// so that an edge beyond that hides nothing, and is left out, or everything.
Band reachable(Band band) {
  constexpr int64_t kBeyond = 2 * kFarthest;
  if (band.lo && *band.lo <= -kBeyond) band.lo.reset();
  if (band.hi && *band.hi >= kBeyond) band.hi.reset();
  if (band.lo) band.lo = std::min(*band.lo, kBeyond);
  if (band.hi) band.hi = std::max(*band.hi, -kBeyond);
  return band;
}

bool is_contiguous(const TensorView& t) {
  if (t.num_elements() == 0) return true;
  int64_t stride = 1;
  for (int d = t.rank - 1; d >= 0; --d) {
    if (t.shape[d] > 1 && t.stride[d] != stride) return false;
    stride *= t.shape[d];
  }
  return true;
}

void borrow_indices(MaskView& view, const TensorView& indices, bool causal) {
  const auto [batch, heads, seqlen_k, vectors, unused] = indices.shape;
  const std::array<int64_t, 4> contiguous{heads * seqlen_k * vectors, seqlen_k * vectors, vectors, 1};
  for (std::size_t d = 0; d < contiguous.size(); ++d) {
    if (indices.shape[d] > 1 && indices.stride[d] != contiguous[d])
      throw_invalid("startend_row_indices is on ", describe(indices.device), " and has stride ", indices.stride[d],
                    " in dimension ", d, "; it is borrowed, so it must be contiguous (stride ", contiguous[d], ")");
  }
  const auto* data = static_cast<const int32_t*>(indices.data);
  for (const auto vector : vector_order(causal, vectors)) {
    if (vector) view.*vector = data++;
  }
  view.bounds_stride = vectors;
  view.device = indices.device;
}

/// Whether the indices have elements.
bool add_indices(MaskView& view, const MaskTensors& mask, Of of) {
  const TensorView& indices = mask.indices;
  if (!indices.defined()) return false;
  check_indices(indices, mask.causal);
  if (of == Of::kContents) check_data("startend_row_indices", indices);
  if (view.seqlen_k == 0) return false;
  view.bounds_batch = indices.shape[0];
  view.bounds_heads = indices.shape[1];
  if (of == Of::kContents) borrow_indices(view, indices, mask.causal);
  return true;
}

/// Whether the block mask has elements.
bool add_block_mask(MaskView& view, const MaskTensors& mask, Of of) {
  const TensorView& keep = mask.block_mask;
  if (!keep.defined()) return false;
  check_block_mask(keep, view.seqlen_q, view.seqlen_k);
  if (of == Of::kContents) check_data("block_mask", keep);
  if (keep.num_elements() == 0) return false;
  view.block_batch = keep.shape[0];
  view.block_heads = keep.shape[1];
  check_broadcast(view);
  if (of == Of::kContents) {
    view.block_mask = static_cast<const uint8_t*>(keep.data);
    view.device = keep.device;
  }
  return true;
}

}  // namespace

MaskView view_of(const MaskTensors& mask, Of of) {
  MaskView view{.seqlen_q = mask.seqlen_q, .seqlen_k = mask.seqlen_k};
  const bool has_vectors = add_indices(view, mask, of);
  check_seqlen("seqlen_q", mask.seqlen_q);
  check_seqlen("seqlen_k", mask.seqlen_k);
  Band band = mask.band;
  set_band(view, band, mask.q_offset.value_or(mask.seqlen_k - mask.seqlen_q));
  const bool has_blocks = add_block_mask(view, mask, of);
  if (!has_vectors && !has_blocks) view.content_hash = content_hash::finish(content_hash::frame(view), 0);
  return view;
}

bool can_be_borrowed(const MaskTensors& mask) {
  return is_contiguous(mask.indices) && is_contiguous(mask.block_mask) && mask.block_mask.dtype != DataType::kInt32;
}

std::array<const int32_t* MaskView::*, 4> vector_order(bool causal, int64_t vectors) {
  if (causal && vectors == 1) return {&MaskView::lts};
  if (causal && vectors == 2) return {&MaskView::lts, &MaskView::lte};
  if (!causal && vectors == 2) return {&MaskView::lts, &MaskView::ute};
  if (!causal && vectors == 4) return {&MaskView::lts, &MaskView::lte, &MaskView::uts, &MaskView::ute};
  throw_invalid("startend_row_indices has ", vectors, " vectors and causal is ", causal ? "true" : "false", "; ",
                kForms);
}

void check_indices(const TensorView& indices, bool causal) {
  if (indices.dtype != DataType::kInt32 || indices.rank != 4) {
    throw_invalid("startend_row_indices is ", describe(indices),
                  "; it must be int32 [batch, heads, seqlen_k, vectors]");
  }
  const auto [batch, heads, seqlen_k, vectors, unused] = indices.shape;
  vector_order(causal, vectors);
  if (batch < 1 || heads < 1 || seqlen_k < 0 || seqlen_k > kMaxSeqlen) {
    throw_invalid("startend_row_indices is ", describe(indices),
                  "; batch and heads must be at least 1, seqlen_k between 0 and ", kMaxSeqlen);
  }
  check_extent("startend_row_indices", indices);
}

void check_block_mask(const TensorView& keep, int64_t seqlen_q, int64_t seqlen_k) {
  const bool on_host = keep.device.kind == Device::Kind::kCpu;
  const bool dtype =
      keep.dtype == DataType::kBool || keep.dtype == DataType::kUInt8 || (on_host && keep.dtype == DataType::kInt32);
  if (keep.rank != 4 || !dtype) {
    throw_invalid("block_mask is ", describe(keep), "; it must be ",
                  on_host ? "bool, uint8 or int32" : "bool or uint8 (on a device)",
                  " [batch, heads, ceil(seqlen_q / 128), ceil(seqlen_k / 128)]");
  }
  check_extent("block_mask", keep);
  check_count("block_mask's batch", keep.shape[0]);
  check_count("block_mask's heads", keep.shape[1]);
  const int64_t rows = ceil_div(seqlen_q, kBlockMaskSize), keys = ceil_div(seqlen_k, kBlockMaskSize);
  if (keep.shape[2] != rows || keep.shape[3] != keys)
    throw_invalid("block_mask is ", describe(keep), "; its last two dimensions must be ", rows, " and ", keys,
                  ", ceil(seqlen / 128)");
  if (!on_host && !is_contiguous(keep))
    throw_invalid("block_mask is on ", describe(keep.device), " and not contiguous; it is borrowed, so it must be");
}

void check_seqlen(const char* argument, int64_t seqlen) {
  if (seqlen < 0 || seqlen > kMaxSeqlen)
    throw_invalid(argument, " is ", seqlen, "; it must be between 0 and ", kMaxSeqlen);
}

void set_band(MaskView& view, Band& band, int64_t q_offset) {
  if (q_offset < -kFarthest || q_offset > kFarthest)
    throw_invalid("q_offset is ", q_offset, "; it must be between -2^40 and 2^40");
  band = reachable(band);
  const Diagonals diagonals = absolute_diagonals(band, q_offset);
  view.diagonal_lo = diagonals.lo;
  view.diagonal_hi = diagonals.hi;
}

void check_broadcast(const MaskView& view) {
  const int64_t batches[] = {view.bounds_batch, view.block_batch};
  if (batches[0] != batches[1] && batches[0] != 1 && batches[1] != 1) {
    throw_invalid("the mask's vectors have ", view.bounds_batch, " batch entries and its block mask ", view.block_batch,
                  "; they must be equal, or one of them 1");
  }
  const auto [fewer, more] = std::minmax(view.bounds_heads, view.block_heads);
  if (more % fewer != 0) {
    throw_invalid("the mask's vectors have ", view.bounds_heads, " heads and its block mask ", view.block_heads,
                  "; one must divide the other");
  }
}

}  // namespace flashmask
