// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "flashmask/inspect.h"

namespace flashmask::show {

/// A picture, row by row from the top, three bytes (red, green, blue) a pixel.
struct Pixels {
  int64_t width = 0, height = 0;
  std::vector<uint8_t> rgb{};

  uint8_t* at(int64_t x, int64_t y) { return rgb.data() + 3 * (y * width + x); }
};

/// The plot of draw_svg without words, axes and legend: the same cells in the same colours under the same lines, each cell
/// a whole number of pixels wide and high. Throws for a mask without elements: a picture has at least one pixel.
Pixels draw_pixels(const Mask& mask, const DrawOptions& options = {});

/// As a PNG file; the same bytes for the same pixels.
std::string to_png(const Pixels& pixels);

}  // namespace flashmask::show
