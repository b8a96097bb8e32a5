// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "draw/cell_grid.h"
#include "draw/svg_markup.h"

namespace flashmask {

/// The colours of elements. A cell that holds several kinds has the mixture.
namespace colours {
inline constexpr Colour kSkipped{0xe8, 0xec, 0xf1};        ///< in a skipped tile
inline constexpr Colour kPartialHidden{0xfb, 0xe6, 0xbd};  ///< in a partial tile, hidden
inline constexpr Colour kPartialVisible{0xdd, 0x8a, 0x12};
inline constexpr Colour kFull{0x3f, 0x7f, 0xc9};  ///< in a full tile
}  // namespace colours

/// Mixes the colours of a cell's contents.
Colour cell_colour(const Cell& cell);

/// The cells of a grid as one SVG path for each colour, in units of cells; cells that lie in skipped tiles
/// altogether are left to the background.
std::string cell_paths(const CellGrid& grid);

}  // namespace flashmask
