// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

#include "draw/cell_grid.h"
#include "draw/words.h"
#include "flashmask/draw.h"

namespace flashmask {
namespace {

constexpr int64_t kDefaultCells = 64;

/// Two characters.
std::string_view symbol(const Cell& cell, bool is_element) {
  const bool none = cell.visible == 0, all = cell.visible == cell.elements;
  if (is_element) return all ? "■ " : "⬚ ";
  if (none) return "··";
  if (all) return "██";
  const double share = static_cast<double>(cell.visible) / static_cast<double>(cell.elements);
  return share < 1.0 / 3 ? "░░" : share < 2.0 / 3 ? "▒▒" : "▓▓";
}

std::string padded_left(const std::string& text, std::size_t width) {
  return std::string(width - std::min(width, text.size()), ' ') + text;
}

/// True if a new tile begins exactly with this cell; tiles thinner than two cells are not marked.
bool tile_begins(const Partition& cells, int64_t cell, int64_t tile) {
  return cell > 0 && tile / cells.step() >= 2 && cells.begin(cell) % tile == 0;
}

/// Writes a grid row by row, indices every few cells at the left and above.
class TextDrawing {
 public:
  explicit TextDrawing(const CellGrid& grid)
      : grid_(grid),
        gutter_(std::max<std::size_t>(grouped(grid.rows().length()).size(), 5)),
        key_stride_(grouped(grid.keys().length()).size() < 8 ? 4 : 8) {}

  std::string draw() {
    text_ = std::string(gutter_, ' ') + " key j\n";
    write_key_indices();
    write_edge();
    for (int64_t r = 0; r < grid_.rows().parts(); ++r) write_row(r);
    return std::move(text_);
  }

 private:
  void write_key_indices() {
    std::string line = padded_left("row i", gutter_) + "  ";
    for (int64_t k = 0; k < grid_.keys().parts(); k += key_stride_) {
      const std::string index = grouped(grid_.keys().begin(k));
      line += index + std::string(static_cast<std::size_t>(2 * key_stride_) - index.size(), ' ');
    }
    write_line(line);
  }

  void write_edge() {
    std::string line = std::string(gutter_, ' ') + " ┌";
    for (int64_t k = 0; k < grid_.keys().parts(); ++k)
      line += tile_begins(grid_.keys(), k, grid_.statistics().tile.keys) ? "┬─" : "──";
    write_line(line);
  }

  void write_row(int64_t r) {
    std::string line = padded_left(r % 4 == 0 ? grouped(grid_.rows().begin(r)) : "", gutter_);
    line += tile_begins(grid_.rows(), r, grid_.statistics().tile.rows) ? " ├" : " │";
    for (int64_t k = 0; k < grid_.keys().parts(); ++k) line += symbol(grid_.at(r, k), grid_.shows_elements());
    write_line(line);
  }

  void write_line(std::string_view line) {
    while (!line.empty() && line.back() == ' ') line.remove_suffix(1);
    text_.append(line).append("\n");
  }

  const CellGrid& grid_;
  const std::size_t gutter_;
  const int64_t key_stride_;
  std::string text_;
};

std::string symbols_legend(const CellGrid& grid) {
  if (grid.shows_elements()) return "■ visible  ⬚ hidden";
  return "visible: ·· none  ░░ < 1/3  ▒▒ < 2/3  ▓▓ more  ██ all; a cell is " + grouped(grid.rows().step()) + " x " +
         grouped(grid.keys().step()) + " elements";
}

std::string legend(const Mask& mask, const DrawOptions& options, const CellGrid& grid) {
  const MaskStatistics& s = grid.statistics();
  const int64_t skipped = s.tiles - s.live_tiles();
  const auto count = [&](int64_t tiles, const char* what) {
    return grouped(tiles) + " " + what + " (" + percent(tiles, s.tiles) + ")";
  };
  std::string text = grouped(mask.seqlen_q()) + " query rows x " + grouped(mask.seqlen_k()) + " keys" +
                     describe_entry(mask, options.batch, options.head) + "; " + describe_band(mask) + "; " +
                     describe_intervals(mask) + "\n";
  text += "visible " + grouped(s.visible) + " of " + grouped(s.elements) + " elements (" +
          percent(s.visible, s.elements) + ")\n";
  text += grouped(s.tiles) + (s.tiles == 1 ? " tile of " : " tiles of ") + grouped(s.tile.rows) + " x " +
          grouped(s.tile.keys) + ": " + count(skipped, "skipped") + ", " + count(s.partial_tiles, "partial") + ", " +
          count(s.full_tiles, "full") + "\n";
  text += "FLOPs saved against a dense mask: " + percent(skipped, s.tiles) + "\n";
  return text;
}

}  // namespace

std::string draw_text(const Mask& mask, const DrawOptions& options) {
  const CellGrid grid(mask, options, checked_max_cells(mask, options, kDefaultCells));
  const std::string picture = grid.empty() ? "(no elements)\n" : TextDrawing(grid).draw() + symbols_legend(grid) + "\n";
  return picture + legend(mask, options, grid);
}

}  // namespace flashmask
