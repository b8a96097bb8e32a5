// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/host/backward_tiles.h"

#include "backends/cuda/host/call_params.h"
#include "common/arithmetic.h"
#include "common/message.h"

namespace flashmask::cuda {

BackwardTiles::BackwardTiles(const Problem& p, int tile_rows, int tile_keys)
    : rows(ceil_div(p.seqlen_q, int64_t{tile_rows})),
      key_blocks(ceil_div(p.seqlen_k, kGranuleKeys)),
      keys(key_blocks * (kGranuleKeys / tile_keys)),
      all_rows(p.batch * p.heads_q * rows),
      all_keys(p.batch * p.heads_kv * keys) {}

std::string tiles_refusal(const Problem& p, int tile_rows, int tile_keys) {
  const BackwardTiles tiles(p, tile_rows, tile_keys);
  struct Count {
    const char* what;
    int tile;
    int64_t tiles;
  };
  for (const Count& c : {Count{"batch * heads_q * seqlen_q / ", tile_rows, tiles.all_rows},
                         Count{"batch * heads_kv * seqlen_k / ", tile_keys, tiles.all_keys},
                         Count{"batch * heads_q * seqlen_k / ", tile_keys, tiles.all_keys * p.group_size()},
                         Count{"batch * heads_q / ", 1, p.batch * p.heads_q}}) {
    if (c.tiles > kMostWorkTiles)
      return message(c.what, c.tile, " is about ", c.tiles, "; the backward takes at most ", kMostWorkTiles);
  }
  return "";
}

}  // namespace flashmask::cuda
