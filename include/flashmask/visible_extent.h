// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace flashmask {

/// How far the visible elements of a batch entry reach, over all its heads: `rows` is one past the last row that sees a
/// key, `keys` one past the last key that a row sees; 0 if there is none.
struct VisibleExtent {
  int32_t rows = 0, keys = 0;

  bool operator==(const VisibleExtent&) const = default;
};

}  // namespace flashmask
