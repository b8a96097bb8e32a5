// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "flashmask/draw.h"
#include "flashmask/placement.h"

namespace flashmask::show {

/// Table of each rank's work: rows, segments, live tiles and received keys.
std::string ranks_text(const Placement& placement);

nlohmann::ordered_json ranks_json(const Placement& placement);

/// The mask entry that `draw` names as an SVG: live tiles in the colours of the ranks that compute them, and beside
/// them each rank's load and received keys. A long mask is drawn in cells of several tiles.
std::string draw_ranks(const Mask& mask, const Placement& placement, const DrawOptions& draw);

}  // namespace flashmask::show
