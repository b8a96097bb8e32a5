// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "flashmask/mask.h"

namespace flashmask::placement {

/// Row units [begin, end).
struct UnitRange {
  int32_t begin, end;
  bool operator==(const UnitRange&) const = default;
};

/// Neighbouring keys of one unit that rows of the same units see, in some head.
struct KeyGroup {
  int64_t unit, keys;
  std::size_t first_range, ranges;  ///< in SeenKeys::ranges; ranges of different heads may overlap
};

/// Which units see the keys of one batch entry.
struct SeenKeys {
  std::vector<KeyGroup> groups;
  std::vector<UnitRange> ranges;
  std::span<const UnitRange> seeing(const KeyGroup& group) const {
    return std::span(ranges).subspan(group.first_range, group.ranges);
  }
};

/// Properties of a mask that placing reads.
struct Visibility {
  int64_t unit = 128, units = 0;
  std::vector<int64_t> tiles;     ///< [units]: Placement::live_tiles of each unit
  std::vector<SeenKeys> entries;  ///< one for each batch entry
};

/// `unit` is placement_unit's, a power of two.
Visibility visibility(const MaskView& mask, int64_t unit);

/// For each rank the keys of others that its rows see, summed over batch entries: Placement::received.
std::vector<int64_t> received_keys(const Visibility& seen, std::span<const int32_t> owner, int64_t ranks);

}  // namespace flashmask::placement
