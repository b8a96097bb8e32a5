// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "call/problem.h"

namespace flashmask::cuda {

// Of a backward: its work tiles are key tiles of head groups, which have all query heads of a key head, or one of the
// `splits` equal parts of them.

/// Into how many parts the query heads of a key head are split, of which the call has `key_tiles` tiles: as few as give
/// each multiprocessor a work tile, and more where few long ones would not come evenly. Of the device and the shapes
/// alone, so that neither the workspace nor the bits depend on more.
int64_t count_splits(const Problem& p, int64_t key_tiles);

/// Head groups of batch entries that run together, so that what they read (q, dout) and add up (dq) for their rows
/// stays at hand.
int64_t head_groups_in_l2(const Problem& p, int64_t splits);

/// As many, or more, in L2 groups of about one size: enough for an L2 group's longest work tile not to outlast all
/// others. `key_tiles`: of a head group.
int64_t head_groups_for_rounds(const Problem& p, int64_t splits, int64_t key_tiles);

}  // namespace flashmask::cuda
