// SPDX-License-Identifier: Apache-2.0
#include "mask/mask_tensors.h"

#include <algorithm>
#include <tuple>
#include <utility>

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

void check_count(const char* argument, int64_t count) {
  if (count < 1) throw_invalid(argument, " is ", count, "; it must be at least 1 (1 is broadcast)");
}

/// The band with edges whose sums do not overflow: |j - (i + q_offset)| is below 2^41 whatever the q_offset, so that an
/// edge beyond that hides nothing, and is left out, or everything.
Band reachable(Band band) {
  constexpr int64_t kBeyond = 2 * kMaxOffset;
  if (band.lo && *band.lo <= -kBeyond) band.lo.reset();
  if (band.hi && *band.hi >= kBeyond) band.hi.reset();
  if (band.lo) band.lo = std::min(*band.lo, kBeyond);
  if (band.hi) band.hi = std::max(*band.hi, -kBeyond);
  return band;
}

/// The band with edges that fit comparisons in 32 bits with positions, which differ by less than 2^32.
Band comparable(Band band) {
  if (band.lo && *band.lo > INT32_MAX)
    throw_invalid("the band's lower edge is ", *band.lo, "; with positions it must be at most ", INT32_MAX);
  if (band.hi && *band.hi < -INT32_MAX)
    throw_invalid("the band's upper edge is ", *band.hi, "; with positions it must be at least ", -INT32_MAX);
  if (band.lo && *band.lo <= -INT32_MAX) band.lo.reset();
  if (band.hi && *band.hi >= INT32_MAX) band.hi.reset();
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

void check_contiguous(const TensorView& indices) {
  const auto [batch, heads, seqlen_k, vectors, unused] = indices.shape;
  const std::array<int64_t, 4> contiguous{heads * seqlen_k * vectors, seqlen_k * vectors, vectors, 1};
  for (std::size_t d = 0; d < contiguous.size(); ++d) {
    if (indices.shape[d] > 1 && indices.stride[d] != contiguous[d])
      throw_invalid("startend_row_indices is on ", describe(indices.device), " and has stride ", indices.stride[d],
                    " in dimension ", d, "; it is borrowed, so it must be contiguous (stride ", contiguous[d], ")");
  }
}

/// Adds the indices; returns whether they have elements.
bool add_indices(MaskView& view, const MaskTensors& mask) {
  const TensorView& indices = mask.indices;
  if (!indices.defined()) return false;
  check_indices(indices, mask.causal);
  if (view.seqlen_k == 0) return false;
  view.bounds_batch = indices.shape[0];
  view.bounds_heads = indices.shape[1];
  const auto* data = static_cast<const int32_t*>(indices.data);
  for (const auto vector : vector_order(mask.causal, indices.shape[3])) {
    if (vector && data) view.*vector = data++;
  }
  view.bounds_stride = indices.shape[3];
  view.device = indices.device;
  return true;
}

/// Adds the interval lists as they are, not normalised; returns whether they have elements.
bool add_interval_lists(MaskView& view, const MaskTensors& mask) {
  check_interval_lists(mask);
  if (!mask.column_ptr.defined() || view.seqlen_k == 0) return false;
  view.bounds_batch = mask.column_ptr.shape[0];
  view.bounds_heads = mask.column_ptr.shape[1];
  view.column_ptr = static_cast<const int32_t*>(mask.column_ptr.data);
  view.intervals = static_cast<const int32_t*>(mask.intervals.data);
  view.listed_intervals = mask.intervals.shape[0];
  view.device = mask.column_ptr.device;
  return true;
}

/// Adds the block mask; returns whether it has elements.
bool add_block_mask(MaskView& view, const MaskTensors& mask) {
  const TensorView& keep = mask.block_mask;
  if (!keep.defined()) return false;
  check_block_mask(keep, view.seqlen_q, view.seqlen_k);
  if (keep.num_elements() == 0) return false;
  view.block_batch = keep.shape[0];
  view.block_heads = keep.shape[1];
  check_broadcast(view);
  view.block_mask = static_cast<const uint8_t*>(keep.data);
  view.device = keep.device;
  return true;
}

/// Adds the positions; returns whether they have elements.
bool add_positions(MaskView& view, const MaskTensors& mask) {
  check_positions(mask);
  if (!mask.q_pos.defined()) return false;
  for (const auto& [argument, t] :
       {std::pair<const char*, const TensorView&>{"q_pos", mask.q_pos}, {"k_pos", mask.k_pos}}) {
    if (t.device.kind != Device::Kind::kCpu && !is_contiguous(t))
      throw_invalid(argument, " is on ", describe(t.device), " and not contiguous; it is borrowed, so it must be");
  }
  if (view.seqlen_q == 0 || view.seqlen_k == 0) return false;
  view.has_positions = true;
  view.q_pos_batch = mask.q_pos.shape[0];
  view.k_pos_batch = mask.k_pos.shape[0];
  view.q_pos = static_cast<const int32_t*>(mask.q_pos.data);
  view.k_pos = static_cast<const int32_t*>(mask.k_pos.data);
  view.device = mask.q_pos.device;
  return true;
}

}  // namespace

MaskView view_of(const MaskTensors& mask) {
  MaskView view{.seqlen_q = mask.seqlen_q, .seqlen_k = mask.seqlen_k};
  const bool has_vectors = add_indices(view, mask);
  check_seqlen("seqlen_q", mask.seqlen_q);
  check_seqlen("seqlen_k", mask.seqlen_k);
  const bool has_lists = add_interval_lists(view, mask), has_positions = add_positions(view, mask);
  Band band = mask.band;
  set_band(view, band, has_positions ? 0 : mask.q_offset.value_or(mask.seqlen_k - mask.seqlen_q));
  const bool has_blocks = add_block_mask(view, mask);
  check_broadcast(view);
  if (!has_vectors && !has_lists && !has_blocks && !has_positions)
    view.content_hash = content_hash::finish(content_hash::frame(view), 0);
  return view;
}

void check_contents(const MaskTensors& mask) {
  const TensorView& indices = mask.indices;
  for (const auto& [argument, t] : {std::pair<const char*, const TensorView&>{"startend_row_indices", indices},
                                    {"block_mask", mask.block_mask},
                                    {"q_pos", mask.q_pos},
                                    {"k_pos", mask.k_pos},
                                    {"column_ptr", mask.column_ptr},
                                    {"intervals", mask.intervals}}) {
    if (t.defined()) check_data(argument, t);
  }
  if (indices.defined() && indices.device.kind != Device::Kind::kCpu && mask.seqlen_k > 0) check_contiguous(indices);
  if (const TensorView& t = mask.intervals; t.defined() && t.device.kind != Device::Kind::kCpu) {
    if (reinterpret_cast<std::uintptr_t>(t.data) % 8 != 0)
      throw_invalid("intervals is on ", describe(t.device),
                    " and not aligned to 8 bytes; it is borrowed, so it must be");
  }
}

bool can_be_borrowed(const MaskTensors& mask) {
  if (mask.column_ptr.defined()) return false;  // they have to be normalised
  return is_contiguous(mask.indices) && is_contiguous(mask.block_mask) && mask.block_mask.dtype != DataType::kInt32 &&
         is_contiguous(mask.q_pos) && is_contiguous(mask.k_pos);
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

void check_positions(const MaskTensors& mask) {
  if (!mask.q_pos.defined() && !mask.k_pos.defined()) return;
  for (const auto& [argument, t, other, seqlen, shape] :
       {std::tuple<const char*, const TensorView&, const char*, int64_t, const char*>{
            "q_pos", mask.q_pos, "k_pos", mask.seqlen_q, "[batch or 1, seqlen_q]"},
        {"k_pos", mask.k_pos, "q_pos", mask.seqlen_k, "[batch or 1, seqlen_k]"}}) {
    if (!t.defined())
      throw_invalid(argument, " is absent and ", other, " is given; positions of rows and of keys come together");
    if (t.dtype != DataType::kInt32 || t.rank != 2 || t.shape[0] < 1 || t.shape[1] != seqlen)
      throw_invalid(argument, " is ", describe(t), "; it must be int32 ", shape, ", with ", seqlen, " positions");
    check_extent(argument, t);
  }
  if (mask.q_pos.device != mask.k_pos.device)
    throw_invalid("q_pos is on ", describe(mask.q_pos.device), " and k_pos on ", describe(mask.k_pos.device),
                  "; copy one of them to where the other is");
  if (mask.q_offset)
    throw_invalid("q_offset is ", *mask.q_offset, "; it must be absent with q_pos and k_pos, which take its place");
}

void check_interval_lists(const MaskTensors& mask) {
  const TensorView &ptr = mask.column_ptr, &intervals = mask.intervals;
  if (!ptr.defined() && !intervals.defined()) return;
  if (!ptr.defined() || !intervals.defined())
    throw_invalid(ptr.defined() ? "intervals" : "column_ptr", " is absent and ",
                  ptr.defined() ? "column_ptr" : "intervals", " is given; they come together");
  if (mask.indices.defined())
    throw_invalid("column_ptr and startend_row_indices are both given; a mask has one of them");
  if (ptr.dtype != DataType::kInt32 || ptr.rank != 3 || ptr.shape[0] < 1 || ptr.shape[1] < 1 ||
      ptr.shape[2] != mask.seqlen_k + 1)
    throw_invalid("column_ptr is ", describe(ptr), "; it must be int32 [batch, heads, seqlen_k + 1], with ",
                  mask.seqlen_k + 1, " columns' ends");
  if (intervals.dtype != DataType::kInt32 || intervals.rank != 2 || intervals.shape[0] < 0 ||
      intervals.shape[0] > INT32_MAX || intervals.shape[1] != 2)
    throw_invalid("intervals is ", describe(intervals), "; it must be int32 [n, 2], with at most ", INT32_MAX,
                  " pairs of begin and end");
  check_extent("column_ptr", ptr);
  check_extent("intervals", intervals);
  if (ptr.device != intervals.device)
    throw_invalid("column_ptr is on ", describe(ptr.device), " and intervals on ", describe(intervals.device),
                  "; copy one of them to where the other is");
  for (const auto& [argument, t] : {std::pair{"column_ptr", &ptr}, {"intervals", &intervals}}) {
    if (t->device.kind != Device::Kind::kCpu && !is_contiguous(*t))
      throw_invalid(argument, " is on ", describe(t->device), " and not contiguous; it is borrowed, so it must be");
  }
}

void check_seqlen(const char* argument, int64_t seqlen) {
  if (seqlen < 0 || seqlen > kMaxSeqlen)
    throw_invalid(argument, " is ", seqlen, "; it must be between 0 and ", kMaxSeqlen);
}

void set_band(MaskView& view, Band& band, int64_t q_offset) {
  check_offset(q_offset);
  band = view.has_positions ? comparable(band) : reachable(band);
  const Diagonals diagonals = absolute_diagonals(band, q_offset);
  view.q_offset = q_offset;
  view.diagonal_lo = diagonals.lo;
  view.diagonal_hi = diagonals.hi;
}

void check_broadcast(const MaskView& view) {
  const std::tuple<const char*, const char*, int64_t> batches[] = {{"vectors", " have ", view.bounds_batch},
                                                                   {"block mask", " has ", view.block_batch},
                                                                   {"q_pos", " has ", view.q_pos_batch},
                                                                   {"k_pos", " has ", view.k_pos_batch}};
  for (const auto& [a, has, of_a] : batches) {
    for (const auto& [b, unused, of_b] : batches) {
      if (of_a != of_b && of_a != 1 && of_b != 1)
        throw_invalid("the mask's ", a, has, of_a, " batch entries and its ", b, " ", of_b,
                      "; they must be equal, or one of them 1");
    }
  }
  const auto [fewer, more] = std::minmax(view.bounds_heads, view.block_heads);
  if (more % fewer != 0) {
    throw_invalid("the mask's vectors have ", view.bounds_heads, " heads and its block mask ", view.block_heads,
                  "; one must divide the other");
  }
}

}  // namespace flashmask
