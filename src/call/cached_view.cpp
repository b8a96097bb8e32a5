// SPDX-License-Identifier: Apache-2.0
#include "call/cached_problem.h"
#include "flashmask/mask.h"

namespace flashmask {
namespace {

static_assert(SequenceView::kBlockSize == kBlockMaskSize);

/// The elements of a tensor, whose dimensions of one are broadcast where `broadcasts` has their bit.
template <int kRank, typename T = int32_t>
Elements<T, kRank> elements(const TensorView& t, unsigned broadcasts = 0) {
  Elements<T, kRank> all{static_cast<const T*>(t.data)};
  for (int d = 0; d < kRank; ++d)
    all.stride[d] =
        (broadcasts >> d & 1) && t.shape[static_cast<std::size_t>(d)] == 1 ? 0 : t.stride[static_cast<std::size_t>(d)];
  return all;
}

/// q_pos by batch entry and row, or of packed rows by 0 and row.
Int32Elements<2> row_positions(const CachedProblem& p) {
  const TensorView& t = p.mask.q_pos;
  if (!p.is_packed()) return elements<2>(t);
  return {static_cast<const int32_t*>(t.data), {0, t.stride[0]}};
}

}  // namespace

bool differs_by_head(const SequenceMaskView& m) {
  const std::size_t heads = m.key_layout == KeyLayout::kPages ? 2 : 1;
  return (m.bounds.defined() && m.bounds.shape[heads] > 1) || (m.block_mask.defined() && m.block_mask.shape[1] > 1);
}

CachedView view_of(const CachedProblem& p) {
  const SequenceMaskView& m = p.mask;
  const bool in_pages = m.key_layout == KeyLayout::kPages;
  return {.batch = p.batch,
          .rows = p.rows,
          .capacity = p.capacity,
          .page_size = p.page_size,
          .pages = p.pages,
          .cu_seqlens_q = elements<1>(p.cu_seqlens_q),
          .page_indptr = elements<1>(p.cache.page_indptr),
          .page_indices = elements<1>(p.cache.page_indices),
          .seqlens = elements<1>(p.cache.seqlens),
          .tail_lens = elements<1>(m.tail_lens),
          .page_table = elements<2>(p.cache.page_table),
          .tail_depth = elements<2>(m.tail_depth),
          .q_pos = row_positions(p),
          .k_pos = elements<2>(m.k_pos, in_pages ? 0 : 0b01),
          .tail = elements<3>(m.tail),
          .bounds = elements<4>(m.bounds, in_pages ? 0b100 : 0b011),
          .block_mask = elements<4, uint8_t>(m.block_mask, 0b011),
          .index_entries = p.cache.page_indices.shape[0],
          .bound_columns = m.bounds.shape[2],
          .position_columns = m.k_pos.shape[1],
          .tail_rows = m.tail.shape[1],
          .mask_row_blocks = m.block_mask.shape[2],
          .mask_key_blocks = m.block_mask.shape[3],
          .diagonal_lo = p.diagonal_lo,
          .diagonal_hi = p.diagonal_hi,
          .vectors = static_cast<int32_t>(m.bounds.shape[3]),
          .is_packed = p.is_packed(),
          .causal = m.causal,
          .keys_in_pages = in_pages};
}

}  // namespace flashmask
