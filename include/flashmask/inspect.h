// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "flashmask/export.h"
#include "flashmask/mask.h"
#include "flashmask/tiles.h"

namespace flashmask {

/// Exact sums over all batch entries and heads of the mask. Tiles are classified by classify_tiles: with positions, as
/// they are executed.
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

/// Computes statistics in time linear in the lengths and the number of tiles, for each batch entry and head of the
/// mask. With positions it also looks at every element of the granules (64 rows by one key) that the band divides.
FLASHMASK_API MaskStatistics statistics(const Mask& mask, TileShape tile = {});

/// FLOPs of attention over `share` of the score matrix, the paper's convention (section 5.4): two products
/// forward, five backward, two FLOPs per multiply-add. With head_dim == head_dim_v the forward is
/// 4 * batch * heads * seqlen_q * seqlen_k * head_dim * share, the backward 2.5 times that.
struct AttentionFlops {
  double forward = 0, backward = 0;
};
FLASHMASK_API AttentionFlops attention_flops(int64_t batch, int64_t heads, int64_t seqlen_q, int64_t seqlen_k,
                                             int64_t head_dim, int64_t head_dim_v, double share);

}  // namespace flashmask
