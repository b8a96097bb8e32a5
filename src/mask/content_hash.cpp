// SPDX-License-Identifier: Apache-2.0
#include "mask/content_hash.h"

#include "mask/view.h"

namespace flashmask::content_hash {

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
  add(kQPos, view.q_pos, view.q_pos_batch * view.seqlen_q, 1);
  add(kKPos, view.k_pos, view.k_pos_batch * view.seqlen_k, 1);
  if (const uint8_t* keep = view.block_mask) {
    const int64_t blocks = first_block(view, view.block_batch * view.block_heads);
    elements += sum(kBlockMask, blocks, [=](int64_t at) { return keep[at] != 0; });
  }
  return finish(frame(view), elements);
}

}  // namespace flashmask::content_hash
