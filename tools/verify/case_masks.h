// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "families/families.h"
#include "flashmask/mask.h"
#include "verify/case.h"

namespace flashmask::verify {

/// A boolean matrix per mask batch entry and mask head, as the dense-mask mode takes it: nonzero = visible.
struct DenseMask {
  int64_t batch = 1;
  int64_t heads = 1;
  std::vector<uint8_t> visible;  ///< [batch, heads, seqlen_q, seqlen_k]
};

/// The length at which the family of a case is built: the larger of the two. Its last seqlen_q rows and
/// its first seqlen_k keys are kept.
int64_t square_length(const Case& c);

/// The parameters of the family for one mask batch entry and mask head of the case, all of them written
/// out, so that another rule can be given them too. An unknown family has none (it then draws its own from
/// draw_seed).
FamilyParameters draw_parameters(const Case& c, int64_t mask_batch, int64_t mask_head);

/// The seed of that draw.
uint64_t draw_seed(const Case& c, int64_t mask_batch, int64_t mask_head);

/// The case's block mask, [batch, heads, ceil(seqlen_q / 128), ceil(seqlen_k / 128)], keeping about 70 %;
/// empty without one.
struct BlockGrid {
  int64_t batch = 1;
  int64_t heads = 1;
  std::vector<uint8_t> keep;
};
BlockGrid draw_block_mask(const Case& c);

/// The case's positions, [batch, seqlen_q] and [batch, seqlen_k]: a packed tree's, or in no order. Empty without any.
struct DrawnPositions {
  int64_t batch = 1;
  std::vector<int32_t> q_pos, k_pos;
};
DrawnPositions draw_positions(const Case& c);

/// The mask that the call is given: one draw of the family for each mask batch entry and head, cropped to
/// the case's lengths and stacked, with its q_offset, the window intersected and the block mask laid over it. The
/// band compares positions, if any; a mask without a band is causal by them.
Mask make_mask(const Case& c);

/// Dense form of `mask`, to be compared against.
DenseMask dense_of(const Mask& mask);

}  // namespace flashmask::verify
