// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <cmath>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "draw/cell_grid.h"
#include "draw/plot.h"
#include "draw/svg_cells.h"
#include "draw/svg_markup.h"
#include "draw/words.h"
#include "flashmask/draw.h"

namespace flashmask {
namespace {

/// Bytes of the file that the cells may take; a mask too irregular for them is drawn in larger cells.
constexpr std::size_t kMostCellBytes = 250'000;
constexpr int64_t kFewestCells = 64;

// Pixels.
constexpr double kPlotLeft = 72, kPlotTop = 116, kMargin = 28, kLegendHeight = 136, kLine = 22;
constexpr double kWideElement = 24;  // the least that gets a tick in its middle
constexpr double kTickDistance = 48;

constexpr std::string_view kFaded = "#66727f", kFrame = "#9aa5b1";

/// Every how many elements an axis of `pixels` gets a label: a power of two where that fits, or 1, 2, 5, 10, ...
int64_t tick_step(int64_t length, double pixels) {
  const auto most = static_cast<int64_t>(std::clamp(pixels / kTickDistance, 1.0, 8.0));
  const int64_t fewest = std::max<int64_t>((length + most - 1) / most, 1);
  const auto binary = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(fewest)));
  if (length % binary == 0) return binary;
  for (int64_t decade = 1;; decade *= 10) {
    for (const int64_t digit : {1, 2, 5}) {
      if (digit * decade >= fewest) return digit * decade;
    }
  }
}

struct Tick {
  double at;  ///< pixels from where the axis begins
  std::string label;
};

/// In the middle of elements that are wide enough for it; otherwise where elements begin, and at the end.
std::vector<Tick> ticks(int64_t length, double scale) {
  std::vector<Tick> result;
  if (length == 0) return result;
  const bool middle = scale >= kWideElement;
  const int64_t step = tick_step(length, static_cast<double>(length) * scale);
  for (int64_t at = 0; at < length + (middle ? 0 : 1); at += step) {
    const double position = static_cast<double>(at) + (middle ? 0.5 : 0);
    result.push_back({position * scale, step % 1024 == 0 ? binary_units(at) : grouped(at)});
  }
  return result;
}

std::string product(int64_t rows, int64_t keys) { return grouped(rows) + " × " + grouped(keys); }

/// The whole picture but for the cells, which come as `cells`.
class Card {
 public:
  Card(const Mask& mask, const DrawOptions& options, const CellGrid& grid, std::string cells)
      : mask_(mask), options_(options), grid_(grid), statistics_(grid.statistics()), cells_(std::move(cells)) {
    place_plot();
  }

  std::string draw() const {
    const double right = kPlotLeft + std::max(width_, plot::kSize);
    return markup(opening(), title(), plot(), axes(), tile_legend(kPlotLeft, kPlotLeft + 250),
                  figures(kPlotLeft + 290, right), "</svg>\n");
  }

 private:
  /// One cell is a whole number of pixels along the longer side; the shorter one is in proportion, but never thin.
  void place_plot() {
    const Partition& longer = grid_.keys().length() >= grid_.rows().length() ? grid_.keys() : grid_.rows();
    const double cell =
        std::max(1.0, std::round(plot::kSize / static_cast<double>(std::max<int64_t>(longer.parts(), 1))));
    const double scale = cell / static_cast<double>(longer.step());
    const double least = grid_.empty() ? plot::kSize / 8 : static_cast<double>(longer.length()) * scale / 8;
    width_ = std::max(static_cast<double>(grid_.keys().length()) * scale, least);
    height_ = std::max(static_cast<double>(grid_.rows().length()) * scale, least);
    key_scale_ = width_ / static_cast<double>(std::max<int64_t>(grid_.keys().length(), 1));
    row_scale_ = height_ / static_cast<double>(std::max<int64_t>(grid_.rows().length(), 1));
  }

  std::string lengths() const {
    return grouped(mask_.seqlen_q()) + " query rows × " + grouped(mask_.seqlen_k()) + " keys" +
           describe_entry(mask_, options_.batch, options_.head);
  }
  std::string kind() const { return describe_band(mask_) + ", " + describe_intervals(mask_); }
  int64_t skipped_tiles() const { return statistics_.tiles - statistics_.live_tiles(); }

  std::string description() const {
    const MaskStatistics& s = statistics_;
    return markup(kind(), "; visible ", grouped(s.visible), " of ", grouped(s.elements), " elements; ",
                  grouped(s.tiles), " tiles of ", product(s.tile.rows, s.tile.keys), ": ", grouped(skipped_tiles()),
                  " skipped, ", grouped(s.partial_tiles), " partial, ", grouped(s.full_tiles), " full");
  }

  std::string opening() const {
    const double width = kPlotLeft + std::max(width_, plot::kSize) + kMargin,
                 height = kPlotTop + height_ + kLegendHeight;
    return markup("<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"", width, "\" height=\"", height,
                  "\" viewBox=\"0 0 ", width, " ", height,
                  "\" role=\"img\" font-family=\"system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', "
                  "Arial, sans-serif\">\n",
                  "<title>", escaped("Attention mask, " + lengths()), "</title>\n<desc>", escaped(description()),
                  "</desc>\n", "<rect width=\"100%\" height=\"100%\" rx=\"8\" fill=\"#fff\"/>\n");
  }

  std::string title() const {
    return text_at(kPlotLeft, 34, lengths(), {.size = 16, .bold = true}) +
           text_at(kPlotLeft, 54, kind(), {.colour = kFaded});
  }

  std::string plot() const {
    const auto framed = [this](std::string_view attributes) {
      return rectangle_at(kPlotLeft, kPlotTop, width_, height_, attributes);
    };
    const std::string frame = framed(markup("fill=\"none\" stroke=\"", kFrame, "\""));
    if (grid_.empty())
      return frame + text_at(kPlotLeft + width_ / 2, kPlotTop + height_ / 2 + 4, "no elements",
                             {.anchor = "middle", .colour = kFaded});
    return framed(markup("fill=\"", hex(colours::kSkipped), "\"")) + cells() + outlines() + frame;
  }

  /// The cells, in units of cells; the last one of a side may be cut off.
  std::string cells() const {
    const auto units = [](const Partition& side) {
      return static_cast<double>(side.length()) / static_cast<double>(side.step());
    };
    return markup("<svg x=\"", kPlotLeft, "\" y=\"", kPlotTop, "\" width=\"", width_, "\" height=\"", height_,
                  "\" viewBox=\"0 0 ", units(grid_.keys()), " ", units(grid_.rows()),
                  "\" preserveAspectRatio=\"none\" shape-rendering=\"crispEdges\">\n", cells_, "</svg>\n");
  }

  std::string outlines() const {
    const double pixels = std::min(key_scale_, row_scale_);
    const auto grid_lines = [this](int64_t row_step, int64_t key_step, Colour colour, double opacity) {
      if (opacity == 0) return std::string();
      return lines(grid_path(row_step, key_step),
                   markup("stroke=\"", hex(colour), "\" stroke-opacity=\"", opacity, "\""));
    };
    const TileShape tile = statistics_.tile;
    return grid_lines(1, 1, plot::kElementLine, plot::element_line_opacity(grid_, pixels)) +
           grid_lines(tile.rows, tile.keys, plot::kTileLine, plot::tile_line_opacity(grid_, pixels));
  }

  /// Lines at every `row_step` rows and `key_step` keys inside of the plot.
  std::string grid_path(int64_t row_step, int64_t key_step) const {
    std::string path;
    for (int64_t k = 1; k <= (mask_.seqlen_k() - 1) / key_step; ++k) {
      path += markup("M", kPlotLeft + static_cast<double>(k * key_step) * key_scale_, " ", kPlotTop, "v", height_);
    }
    for (int64_t r = 1; r <= (mask_.seqlen_q() - 1) / row_step; ++r) {
      path += markup("M", kPlotLeft, " ", kPlotTop + static_cast<double>(r * row_step) * row_scale_, "h", width_);
    }
    return path;
  }

  std::string axes() const {
    std::string marks, labels;
    for (const Tick& tick : ticks(mask_.seqlen_k(), key_scale_)) {
      marks += markup("M", kPlotLeft + tick.at, " ", kPlotTop, "v-5");
      labels +=
          text_at(kPlotLeft + tick.at, kPlotTop - 9, tick.label, {.anchor = "middle", .colour = kFaded, .size = 11});
    }
    for (const Tick& tick : ticks(mask_.seqlen_q(), row_scale_)) {
      marks += markup("M", kPlotLeft, " ", kPlotTop + tick.at, "h-5");
      labels +=
          text_at(kPlotLeft - 9, kPlotTop + tick.at + 4, tick.label, {.anchor = "end", .colour = kFaded, .size = 11});
    }
    labels += text_at(kPlotLeft + width_ / 2, kPlotTop - 26, "key j", {.anchor = "middle"});
    labels += text_at(24, kPlotTop + height_ / 2, "query row i", {.anchor = "middle", .upwards = true});
    return lines(marks, markup("stroke=\"", kFrame, "\"")) + labels;
  }

  std::string tile_legend(double left, double right) const {
    double y = kPlotTop + height_ + 40;
    std::string text =
        text_at(left, y, "tiles of " + product(statistics_.tile.rows, statistics_.tile.keys), {.bold = true});
    text += text_at(right, y, grouped(statistics_.tiles), {.anchor = "end", .bold = true});
    const auto line = [&](std::string_view name, int64_t tiles, Colour left_half, Colour right_half) {
      y += kLine;
      text += rectangle_at(left, y - 11, 14, 14, markup("fill=\"", hex(left_half), "\""));
      text += rectangle_at(left + 7, y - 11, 7, 14, markup("fill=\"", hex(right_half), "\""));
      text += text_at(left + 24, y, name) + text_at(right, y, grouped(tiles), {.anchor = "end"});
      text += text_at(right - 92, y, percent(tiles, statistics_.tiles), {.anchor = "end", .colour = kFaded});
    };
    line("skipped", skipped_tiles(), colours::kSkipped, colours::kSkipped);
    line("partial", statistics_.partial_tiles, colours::kPartialHidden, colours::kPartialVisible);
    line("full", statistics_.full_tiles, colours::kFull, colours::kFull);
    return text;
  }

  std::string figures(double left, double right) const {
    double y = kPlotTop + height_ + 40;
    std::string text;
    const auto line = [&](std::string_view name, std::string_view value) {
      text += text_at(left, y, name) + text_at(right, y, value, {.anchor = "end", .bold = true});
      y += kLine;
    };
    line("visible elements", percent(statistics_.visible, statistics_.elements));
    line("FLOPs saved vs dense", percent(skipped_tiles(), statistics_.tiles));
    if (grid_.empty()) return text;
    line("one cell",
         grid_.shows_elements() ? "1 element" : product(grid_.rows().step(), grid_.keys().step()) + " elements");
    if (!grid_.shows_elements())
      text += text_at(left, y, "mixing the colours of what it holds", {.colour = kFaded, .size = 11});
    return text;
  }

  const Mask& mask_;
  const DrawOptions& options_;
  const CellGrid& grid_;
  const MaskStatistics& statistics_;
  const std::string cells_;
  double width_ = 0, height_ = 0;         // pixels of the plot
  double key_scale_ = 0, row_scale_ = 0;  // pixels per key and per query row
};

}  // namespace

std::string draw_svg(const Mask& mask, const DrawOptions& options) {
  for (int64_t max_cells = checked_max_cells(mask, options, plot::kDefaultCells);; max_cells /= 2) {
    const CellGrid grid(mask, options, max_cells);
    std::string cells = cell_paths(grid);
    if (cells.size() > kMostCellBytes && max_cells / 2 >= kFewestCells) continue;
    return Card(mask, options, grid, std::move(cells)).draw();
  }
}

}  // namespace flashmask
