// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

#include "draw/cell_grid.h"
#include "draw/svg_markup.h"

/// Shared by drawings of a mask as SVG and as pixels.
namespace flashmask::plot {

inline constexpr int64_t kDefaultCells = 256;
inline constexpr double kSize = 512;  ///< pixels of the plot's longer side, about

inline constexpr Colour kElementLine{0xff, 0xff, 0xff}, kTileLine{0x1f, 0x29, 0x33};

/// Opacity of the lines between elements, `pixels` being an element's shorter side; 0: no lines.
inline double element_line_opacity(const CellGrid& grid, double pixels) {
  constexpr double kLeastElement = 6;
  return grid.shows_elements() && pixels >= kLeastElement ? 0.5 : 0;
}

/// Opacity of the lines between tiles: fainter for small tiles, 0 for many tiles.
inline double tile_line_opacity(const CellGrid& grid, double pixels) {
  constexpr int64_t kMostTiles = 64;  // a side
  constexpr double kWideTile = 20;
  const TileShape tile = grid.statistics().tile;
  const auto few = [](int64_t length, int64_t side) { return (length - 1) / side < kMostTiles; };
  if (!few(grid.rows().length(), tile.rows) || !few(grid.keys().length(), tile.keys)) return 0;
  return static_cast<double>(std::min(tile.rows, tile.keys)) * pixels >= kWideTile ? 0.4 : 0.12;
}

}  // namespace flashmask::plot
