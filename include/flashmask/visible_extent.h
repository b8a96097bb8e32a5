// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace flashmask {

/// Extent of a batch entry's visible elements, over all heads: `rows` is one past the last row that sees a key, `keys`
/// one past the last key that a row sees; 0 if nothing is visible.
struct VisibleExtent {
  int32_t rows = 0, keys = 0;

  bool operator==(const VisibleExtent&) const = default;
};

}  // namespace flashmask
