// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>

#include "flashmask/mask.h"

namespace flashmask {

/// Masks made from shapes alone, for what asks for no more and before contents are read: everything is checked but the
/// data pointers, which may be null. Such a mask has the lengths, band, batch and heads, without vectors or a block
/// mask, and its content_hash is 0.
struct Outline {
  /// Of flashmask::from_startend_row_indices.
  static Mask from_startend_row_indices(const TensorView& indices, bool causal, int64_t seqlen_q,
                                        std::optional<int64_t> q_offset);
  /// Of mask.with_block_mask(keep).
  static Mask with_block_mask(const Mask& mask, const TensorView& keep);
};

}  // namespace flashmask
