// SPDX-License-Identifier: Apache-2.0
#include "mask/content_hash.h"

#include "mask/view.h"

namespace flashmask::content_hash {

uint64_t of_lists(std::span<const int32_t> column_ptr, std::span<const int32_t> intervals) {
  const auto ends = static_cast<int64_t>(column_ptr.size());
  return sum(Source::kIntervalLists, ends + static_cast<int64_t>(intervals.size()), [=](int64_t at) {
    return at < ends ? column_ptr[static_cast<std::size_t>(at)] : intervals[static_cast<std::size_t>(at - ends)];
  });
}

uint64_t of(const MaskView& view) {
  using enum Source;
  uint64_t elements = 0;
  const auto add = [&elements](Source source, const int32_t* values, int64_t count, int64_t stride) {
    if (values) elements += sum(source, count, [=](int64_t at) { return values[at * stride]; });
  };
  const int64_t columns = view.bounds_batch * view.bounds_heads * view.seqlen_k;
  add(kLts, view.lts, columns, view.bounds_stride);
  add(kLte, view.lte, columns, view.bounds_stride);
  add(kUts, view.uts, columns, view.bounds_stride);
  add(kUte, view.ute, columns, view.bounds_stride);
  if (view.column_ptr) {
    const int64_t ends = view.bounds_batch * view.bounds_heads * (view.seqlen_k + 1);
    elements += of_lists({view.column_ptr, static_cast<std::size_t>(ends)},
                         {view.intervals, static_cast<std::size_t>(2 * int64_t{view.column_ptr[ends - 1]})});
  }
  add(kQPos, view.q_pos, view.q_pos_batch * view.seqlen_q, 1);
  add(kKPos, view.k_pos, view.k_pos_batch * view.seqlen_k, 1);
  if (const uint8_t* keep = view.block_mask) {
    const int64_t blocks = first_block(view, view.block_batch * view.block_heads);
    elements += sum(kBlockMask, blocks, [=](int64_t at) { return keep[at] != 0; });
  }
  return finish(frame(view), elements);
}

}  // namespace flashmask::content_hash
