// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

#include "backends/cpu/tile_kernels.h"
#include "backends/problem.h"
#include "mask/rules.h"

namespace flashmask::cpu {

/// Which elements of a partial tile are visible: bit i % 32 of rows[i / 32][j] for row i and key j of the tile.
/// Rows and keys past the end of the sequence are not visible. Keys are a vector's lanes or broadcast, as the
/// kernel needs it.
struct alignas(64) ElementMask {
  uint32_t rows[kTileRows / 32][kTileKeys];

  /// From the mask's rule. Blocks that a block mask clears are never live, so it does not show up here.
  void load(const rules::Columns& columns, int64_t row0, int64_t key0, int64_t keys) {
    for (int64_t j = 0; j < kTileKeys; ++j) {
      const uint64_t bits =
          j < keys ? rules::visible_bits(rules::hidden_rows(columns, static_cast<int32_t>(key0 + j)), static_cast<int32_t>(row0)) : 0;
      rows[0][j] = static_cast<uint32_t>(bits);
      rows[1][j] = static_cast<uint32_t>(bits >> 32);
    }
  }

  /// From a dense matrix, whose keys are contiguous.
  void load(const uint8_t* matrix, int64_t row_stride, int64_t row_count, int64_t keys) {
    std::fill(&rows[0][0], &rows[0][0] + sizeof(rows) / sizeof(uint32_t), 0u);
    for (int64_t i = 0; i < row_count; ++i) {
      const uint8_t* row = matrix + i * row_stride;
      uint32_t* out = rows[i / 32];
      for (int64_t j = 0; j < keys; ++j) out[j] |= static_cast<uint32_t>(row[j] != 0) << (i % 32);
    }
  }
};

}  // namespace flashmask::cpu
