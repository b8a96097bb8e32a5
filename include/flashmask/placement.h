// SPDX-License-Identifier: Apache-2.0
#pragma once

// Context parallelism: which rank (process, GPU) holds and computes which rows of a sequence.

#include <cstdint>
#include <span>
#include <vector>

#include "flashmask/export.h"
#include "flashmask/mask.h"

namespace flashmask {

enum class PlacementScheme : uint8_t {
  kContiguous = 0,  ///< one run of rows for each rank
  kZigzag = 1,      ///< two runs: rank r has the r-th from the beginning and the r-th from the end
  kBalanced = 2,    ///< equally many rows for each rank, loads within `load_slack`, and few keys to receive
};

/// Rows are handed out in units, so that a unit of 128 rows keeps its row tile of the plan, and ranks differ by one
/// unit at most. A rank's rows, and the keys that lie with them, keep their order.
struct FLASHMASK_API Placement {
  int64_t seqlen = 0, ranks = 1;
  int64_t unit = 128;            ///< rows of a unit, see placement_unit
  std::vector<int32_t> owner{};  ///< [ceil(seqlen / unit)]: the rank of each unit
  /// [masks, ranks]: live tiles of `unit` rows x min(unit, 128) keys, summed over batch entries and heads of the mask.
  std::vector<int64_t> live_tiles{};
  /// [masks, ranks]: the keys of other ranks that some row of the rank sees in some head, summed over the mask's batch
  /// entries. No exchange of keys and values needs fewer. For a mask with a block mask or a band over positions it
  /// counts the keys of live tiles, which may be more.
  std::vector<int64_t> received{};

  /// A rank's rows in ascending order, neighbouring units as one.
  std::vector<RowSegment> segments(int64_t rank) const;
};

/// Rows of a unit: 128; fewer in short sequences, so that each rank may have two units, unless a block mask needs whole
/// blocks; more in long ones, so that there are at most 16384 units.
FLASHMASK_API int64_t placement_unit(int64_t seqlen, int64_t ranks, bool has_block_mask);

/// Hands out the rows of a sequence. The masks are of layers of different kinds of one sequence, in host memory, with
/// as many keys as rows; each is balanced by itself, because ranks wait for each other in each layer. Depends only on
/// its arguments, so every rank computes the same placement without communication, in time nearly linear in seqlen.
///
/// kBalanced begins with whole runs of rows (both other schemes) cut into chunks, exchanges chunks of one size between
/// ranks, the cheapest in keys per load moved first, and cuts chunks in two until the largest load is within
/// 1 + `load_slack` of the mean or chunks are units; then it makes the exchanges that save keys within that slack.
///
/// Throws if there are no masks, lengths differ, a mask is not in host memory, `ranks` is not within [1, 65536], or
/// `load_slack` not within [0, 1].
FLASHMASK_API Placement place(std::span<const MaskView> masks, int64_t ranks,
                              PlacementScheme scheme = PlacementScheme::kBalanced, double load_slack = 0.02);

}  // namespace flashmask
