// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "flashmask/export.h"
#include "flashmask/mask.h"
#include "flashmask/tiles.h"

namespace flashmask {

/// Sums over all batch entries and heads of the mask, all of them exact.
struct MaskStatistics {
  int64_t elements = 0;
  int64_t visible = 0;
  TileShape tile;
  int64_t tiles = 0, partial_tiles = 0, full_tiles = 0;

  int64_t live_tiles() const { return partial_tiles + full_tiles; }
  /// Visible elements / elements; 0 for an empty mask.
  double visible_share() const { return elements ? static_cast<double>(visible) / static_cast<double>(elements) : 0; }
  /// Live tiles / tiles: 1 - the block sparsity of the paper's section 4.4; 0 for an empty mask.
  double live_share() const { return tiles ? static_cast<double>(live_tiles()) / static_cast<double>(tiles) : 0; }
};

/// In time linear in the lengths and the number of tiles, for each batch entry and head of the mask.
FLASHMASK_API MaskStatistics statistics(const Mask& mask, TileShape tile = {});

/// FLOPs of attention over `share` of the score matrix, the paper's convention (section 5.4): two products
/// forward, five backward, two FLOPs per multiply-add. With head_dim == head_dim_v the forward is
/// 4 * batch * heads * seqlen_q * seqlen_k * head_dim * share, the backward 2.5 times that.
struct AttentionFlops {
  double forward = 0, backward = 0;
};
FLASHMASK_API AttentionFlops attention_flops(int64_t batch, int64_t heads, int64_t seqlen_q, int64_t seqlen_k,
                                             int64_t head_dim, int64_t head_dim_v, double share);

struct DrawOptions {
  int64_t batch = 0, head = 0;  ///< of the mask: which one is drawn
  TileShape tile{};
  /// Longest side of the drawing in cells, at most 4096; longer masks are downsampled, each cell showing its
  /// share of visible elements, which is exact. 0: 64 for text, 256 for SVG. The shorter side has more than a sixteenth
  /// of them, if it has as many elements. A cell does not cross a tile's edge if it can be helped.
  int64_t max_cells = 0;
};

/// A drawing for a terminal, two characters per cell, with axes and a legend; UTF-8, no colour codes. Cells of
/// one element are `■` (visible) or `⬚` (hidden); larger ones are `··` (nothing visible), `░░`, `▒▒`, `▓▓` (less
/// than 1/3, less than 2/3, more) or `██` (everything visible). Tiles begin at the ticks of the frame.
FLASHMASK_API std::string draw_text(const Mask& mask, const DrawOptions& options = {});

/// A self-contained SVG of less than 300 KB: visibility, the classes of the tiles over it, a legend with the
/// statistics. Skipped tiles are grey, full ones blue, partial ones amber, their visible elements darker; a cell
/// that holds several of these mixes their colours. A mask so irregular that the file would be larger is drawn
/// in larger cells.
FLASHMASK_API std::string draw_svg(const Mask& mask, const DrawOptions& options = {});

/// A picture, row by row from the top, three bytes (red, green, blue) a pixel.
struct Pixels {
  int64_t width = 0, height = 0;
  std::vector<uint8_t> rgb{};

  uint8_t* at(int64_t x, int64_t y) { return rgb.data() + 3 * (y * width + x); }
};

/// The plot of draw_svg without words, axes and legend: the same cells in the same colours under the same lines, each
/// cell a whole number of pixels wide and high. kInvalidArgument for a mask without elements: a picture has at least
/// one pixel.
FLASHMASK_API Pixels draw_pixels(const Mask& mask, const DrawOptions& options = {});

}  // namespace flashmask
