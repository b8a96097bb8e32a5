// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "call/problem.h"

namespace flashmask::cuda {

// A backward's work tiles are key tiles of head groups. A head group has all query heads of a key head, or one of their
// `splits` equal parts.

/// Number of parts that the query heads of a key head are split into, for `key_tiles` key tiles in the call: as few as
/// give each multiprocessor a work tile, and more where few long ones would not come evenly. Depends only on the device
/// and the shapes, so that the workspace and the bits do, too.
int64_t count_splits(const Problem& p, int64_t key_tiles);

/// Head groups of batch entries that run together, so that the rows they read (q, dout) and add up (dq) stay at hand.
int64_t head_groups_in_l2(const Problem& p, int64_t splits);

/// At least head_groups_in_l2(), in L2 groups of about one size: enough for an L2 group's longest work tile not to
/// outlast all others. `key_tiles`: key tiles of a head group.
int64_t head_groups_for_rounds(const Problem& p, int64_t splits, int64_t key_tiles);

}  // namespace flashmask::cuda
