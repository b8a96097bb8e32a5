// SPDX-License-Identifier: Apache-2.0
#pragma once

// Drawings of masks, in a separate library: link flashmask::draw (libflashmask_draw.a).

#include <cstdint>
#include <string>
#include <vector>

#include "flashmask/mask.h"
#include "flashmask/tiles.h"

namespace flashmask {

struct DrawOptions {
  int64_t batch = 0, head = 0;  ///< the mask's entry and head to draw
  TileShape tile{};
  /// Longest side of the drawing in cells, at most 4096; longer masks are downsampled, each cell showing its share of
  /// visible elements, which is exact. 0: 64 for text, 256 for SVG. The shorter side has more than a sixteenth as many
  /// cells, if it has as many elements. A cell avoids crossing a tile's edge.
  int64_t max_cells = 0;
};

/// A drawing for a terminal, two characters per cell, with axes and a legend; UTF-8, no colour codes. Cells of
/// one element are `■` (visible) or `⬚` (hidden); larger ones are `··` (nothing visible), `░░`, `▒▒`, `▓▓` (less
/// than 1/3, less than 2/3, more) or `██` (everything visible). Tiles begin at the ticks of the frame.
std::string draw_text(const Mask& mask, const DrawOptions& options = {});

/// A self-contained SVG of less than 300 KB: visibility, the classes of the tiles over it, a legend with the
/// statistics. Skipped tiles are grey, full ones blue, partial ones amber, their visible elements darker; a cell
/// that holds several of these mixes their colours. A mask so irregular that the file would be larger is drawn
/// in larger cells.
std::string draw_svg(const Mask& mask, const DrawOptions& options = {});

/// A picture, row by row from the top, three bytes (red, green, blue) a pixel.
struct Pixels {
  int64_t width = 0, height = 0;
  std::vector<uint8_t> rgb{};

  uint8_t* at(int64_t x, int64_t y) { return rgb.data() + 3 * (y * width + x); }
};

/// The plot of draw_svg without words, axes and legend: the same cells in the same colours under the same lines, each
/// cell a whole number of pixels wide and high. kInvalidArgument for a mask without elements: a picture has at least
/// one pixel.
Pixels draw_pixels(const Mask& mask, const DrawOptions& options = {});

}  // namespace flashmask
