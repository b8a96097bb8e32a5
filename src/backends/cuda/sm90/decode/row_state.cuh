// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/cache/decode_rows.cuh"
#include "backends/cuda/sm90/decode/traits.cuh"

namespace flashmask::sm90 {

using cuda::DecodeRows;

/// The places of a tile's packed rows in the 64 rows of a warpgroup's product. Up to kSpreadRows lie where each thread
/// has one, if scores are plain: that path has no code for others, since a CTA's first instructions come from memory.
template <int kSpreadRows>
struct PackedLayout {
  bool spread;
  __device__ __forceinline__ PackedLayout(const DecodeParams& p, int32_t packed_rows)
      : spread(kSpreadRows > 0 && packed_rows <= kSpreadRows && !p.changes_scores()) {}
  /// The product's row of a packed row.
  __device__ __forceinline__ int32_t row(int32_t packed) const {
    return spread ? packed / 8 * 16 + packed % 8 : packed;
  }
  /// The packed row of a product's row; one that is not there if it has none.
  __device__ __forceinline__ int32_t packed(int32_t row) const {
    if (!spread) return row;
    return row % 16 < 8 ? row / 16 * 8 + row % 16 : kSpreadRows;
  }
};

}  // namespace flashmask::sm90
