// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "flashmask/mask.h"

namespace flashmask::placement {

/// Row units [begin, end) that have a live tile with the keys of one key block.
struct LiveRun {
  int64_t key_block;
  int32_t begin, end;
};

/// What placing looks at of one mask: live tiles of `unit` rows x 128 keys.
struct Visibility {
  int64_t unit = 128, units = 0;
  std::vector<int64_t> tiles;              ///< [units]: live tiles of each unit, over batch entries and heads
  std::vector<std::vector<LiveRun>> runs;  ///< of each batch entry, over heads; those of several heads may overlap
};

Visibility visibility(const MaskView& mask, int64_t unit);

/// For each rank the keys of others that its rows see, summed over batch entries: Placement::received.
std::vector<int64_t> received_keys(const MaskView& mask, const Visibility& seen, std::span<const int32_t> owner,
                                   int64_t ranks);

}  // namespace flashmask::placement
