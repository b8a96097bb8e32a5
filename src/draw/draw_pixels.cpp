// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "common/message.h"
#include "draw/plot.h"
#include "draw/svg_cells.h"
#include "flashmask/draw.h"

namespace flashmask {
namespace {

/// How many pixels a cell has along each axis.
struct CellSize {
  int64_t width, height;
};

/// As in the SVG, where the shorter side is in proportion but never thin; here rounded to whole pixels.
CellSize cell_size(const Partition& rows, const Partition& keys) {
  const bool wide = keys.length() >= rows.length();
  const Partition &longer = wide ? keys : rows, &shorter = wide ? rows : keys;
  const auto pixels = [](double size) { return std::max<int64_t>(std::llround(size), 1); };
  const int64_t longer_cell = pixels(plot::kSize / static_cast<double>(longer.parts()));
  const double in_proportion = static_cast<double>(longer_cell * shorter.step()) / static_cast<double>(longer.step());
  const double least = static_cast<double>(longer.parts() * longer_cell) / 8 / static_cast<double>(shorter.parts());
  const int64_t shorter_cell = pixels(std::max(in_proportion, least));
  return wide ? CellSize{longer_cell, shorter_cell} : CellSize{shorter_cell, longer_cell};
}

void set(uint8_t* pixel, Colour colour) {
  pixel[0] = static_cast<uint8_t>(colour.red);
  pixel[1] = static_cast<uint8_t>(colour.green);
  pixel[2] = static_cast<uint8_t>(colour.blue);
}

void blend(uint8_t* pixel, Colour colour, double opacity) {
  const auto mixed = [opacity](uint8_t below, int above) {
    return static_cast<int>(std::lround(below + (above - below) * opacity));
  };
  set(pixel, {mixed(pixel[0], colour.red), mixed(pixel[1], colour.green), mixed(pixel[2], colour.blue)});
}

/// The pixels at which every `step` elements of an axis begin, but for the first.
std::vector<int64_t> line_places(const Partition& cells, int64_t cell_pixels, int64_t step) {
  std::vector<int64_t> places;
  for (int64_t at = step; at < cells.length(); at += step) places.push_back(at * cell_pixels / cells.step());
  return places;
}

void draw_cells(Pixels& picture, const CellGrid& grid, CellSize cell) {
  for (int64_t y = 0; y < picture.height; ++y) {
    for (int64_t x = 0; x < picture.width; ++x)
      set(picture.at(x, y), cell_colour(grid.at(y / cell.height, x / cell.width)));
  }
}

/// Blends a pixel once even if two lines cross there.
void draw_lines(Pixels& picture, const CellGrid& grid, CellSize cell, TileShape step, Colour colour, double opacity) {
  if (opacity == 0) return;
  const std::vector<int64_t> across = line_places(grid.rows(), cell.height, step.rows),
                             down = line_places(grid.keys(), cell.width, step.keys);
  for (const int64_t y : across) {
    for (int64_t x = 0; x < picture.width; ++x) blend(picture.at(x, y), colour, opacity);
  }
  for (const int64_t x : down) {
    for (int64_t y = 0; y < picture.height; ++y) {
      if (!std::binary_search(across.begin(), across.end(), y)) blend(picture.at(x, y), colour, opacity);
    }
  }
}

}  // namespace

Pixels draw_pixels(const Mask& mask, const DrawOptions& options) {
  const CellGrid grid(mask, options, checked_max_cells(mask, options, plot::kDefaultCells));
  if (grid.empty()) {
    throw_invalid("a picture has at least one pixel; the mask has ", mask.seqlen_q(), " query rows and ",
                  mask.seqlen_k(), " keys");
  }
  const CellSize cell = cell_size(grid.rows(), grid.keys());
  Pixels picture{.width = grid.keys().parts() * cell.width, .height = grid.rows().parts() * cell.height};
  picture.rgb.resize(static_cast<std::size_t>(3 * picture.width * picture.height));
  const double element = std::min(static_cast<double>(cell.width) / static_cast<double>(grid.keys().step()),
                                  static_cast<double>(cell.height) / static_cast<double>(grid.rows().step()));
  draw_cells(picture, grid, cell);
  draw_lines(picture, grid, cell, {1, 1}, plot::kElementLine, plot::element_line_opacity(grid, element));
  draw_lines(picture, grid, cell, grid.statistics().tile, plot::kTileLine, plot::tile_line_opacity(grid, element));
  return picture;
}

}  // namespace flashmask
