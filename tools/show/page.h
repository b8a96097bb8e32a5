// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "families/families.h"
#include "flashmask/draw.h"

namespace flashmask::show {

/// Up to this length a page computes tiles anew while its reader types.
inline constexpr int64_t kMostPageLength = 131'072;
inline constexpr int64_t kMostPageTiles = int64_t{1} << 22;
inline constexpr int64_t kMostPageIntervals = int64_t{1} << 20;

/// Source of a page's mask.
struct PageSource {
  std::string name;  ///< a family, or a file
  bool is_family = true;
  int64_t seqlen = 0;  ///< the rest is a family's
  FamilyParameters parameters{};
  uint64_t seed = 0;
};

/// An HTML page in one file that asks for nothing else: the mask entry that `draw` names, its tiles, the order in which
/// they are handed out and the load that follows, recomputed in the browser as the reader changes the tile and the
/// device. It holds the library's counts and tile classes, and tells its reader if it comes to others. Throws if the
/// mask is too long, has too many tiles or intervals, or a block mask.
std::string draw_page(const Mask& mask, const DrawOptions& draw, const PageSource& source);

}  // namespace flashmask::show
