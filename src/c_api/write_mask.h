// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "flashmask/c_api.h"
#include "flashmask/mask.h"

namespace flashmask::c_api {

/// True if `out` has space for interval lists.
bool takes_lists(const fm_mask* out);

/// Writes a mask into the space that `out` brings: "Where one writes a mask to `out`" in c_api.h. Throws
/// kUnrepresentable, saying that `what` does not fit two intervals, if it needs lists and there is no space for them.
void write_mask(const Mask& mask, fm_mask* out, const char* what);

}  // namespace flashmask::c_api
