// SPDX-License-Identifier: Apache-2.0
#include "draw/svg_cells.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <vector>

namespace flashmask {
namespace {

/// Mixture of a cell's colour, in 16ths and summed up: elements of full tiles, visible elements of any tile, all
/// elements of live tiles; the rest lies in skipped tiles.
struct Mix {
  int full = 0, visible = 0, live = 0;
  auto operator<=>(const Mix&) const = default;
};
constexpr int kLevels = 16;

/// part / whole in levels, never close to none or all unless it is just that: a trace stays visible.
int level(int64_t part, int64_t whole) {
  if (part == 0) return 0;
  if (part == whole) return kLevels;
  const double share = static_cast<double>(part) / static_cast<double>(whole);
  return std::clamp(static_cast<int>(std::lround(share * kLevels)), 2, kLevels - 2);
}

Mix mix_of(const Cell& cell) {
  return {.full = level(cell.in_full_tiles, cell.elements),
          .visible = level(cell.visible, cell.elements),
          .live = level(cell.in_full_tiles + cell.in_partial_tiles, cell.elements)};
}

Colour colour_of(const Mix& mix) {
  const auto channel = [&mix](int Colour::* c) {
    const int sum = mix.full * colours::kFull.*c + (mix.visible - mix.full) * colours::kPartialVisible.*c +
                    (mix.live - mix.visible) * colours::kPartialHidden.*c + (kLevels - mix.live) * colours::kSkipped.*c;
    return sum / kLevels;
  };
  return {channel(&Colour::red), channel(&Colour::green), channel(&Colour::blue)};
}

/// Cells [key_begin, key_end) x [row_begin, row_end) of one colour.
struct Rectangle {
  Mix mix;
  int64_t key_begin, key_end, row_begin, row_end;

  /// True if `run`, one column wide, continues this rectangle to the right.
  bool continues_in(const Rectangle& run) const {
    return key_end == run.key_begin && row_begin == run.row_begin && row_end == run.row_end && mix == run.mix;
  }
};

/// The run of equal cells that begins at `row` of column `key`.
Rectangle run_at(const CellGrid& grid, int64_t row, int64_t key) {
  Rectangle run{mix_of(grid.at(row, key)), key, key + 1, row, row + 1};
  while (run.row_end < grid.rows().parts() && mix_of(grid.at(run.row_end, key)) == run.mix) ++run.row_end;
  return run;
}

/// The runs of every column; one that the column before has too widens that one's rectangle.
std::vector<Rectangle> rectangles(const CellGrid& grid) {
  std::vector<Rectangle> all;
  std::vector<int64_t> latest(static_cast<std::size_t>(grid.rows().parts()),
                              -1);  // the last rectangle that begins in this row
  for (int64_t key = 0; key < grid.keys().parts(); ++key) {
    for (int64_t row = 0; row < grid.rows().parts();) {
      const Rectangle run = run_at(grid, row, key);
      int64_t& before = latest[static_cast<std::size_t>(row)];
      if (before >= 0 && all[static_cast<std::size_t>(before)].continues_in(run)) {
        ++all[static_cast<std::size_t>(before)].key_end;
      } else {
        before = static_cast<int64_t>(all.size());
        all.push_back(run);
      }
      row = run.row_end;
    }
  }
  return all;
}

std::string path_of(const Rectangle& x) {
  const int64_t width = x.key_end - x.key_begin, height = x.row_end - x.row_begin;
  return markup("M", x.key_begin, " ", x.row_begin, "h", width, "v", height, "h-", width);
}

}  // namespace

Colour cell_colour(const Cell& cell) { return colour_of(mix_of(cell)); }

std::string cell_paths(const CellGrid& grid) {
  std::map<Mix, std::string> paths;
  for (const Rectangle& x : rectangles(grid)) {
    if (x.mix != Mix{}) paths[x.mix] += path_of(x);
  }
  std::string text;
  for (const auto& [mix, path] : paths) text += markup("<path fill=\"", hex(colour_of(mix)), "\" d=\"", path, "\"/>\n");
  return text;
}

}  // namespace flashmask
