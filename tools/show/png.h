// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "flashmask/draw.h"

namespace flashmask::show {

/// The pixels as a PNG file; equal pixels give equal bytes.
std::string to_png(const Pixels& pixels);

}  // namespace flashmask::show
