// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/sm90/backward/params.h"

namespace flashmask::sm90::grad {

/// How many sequences are worked on together in deterministic mode. Key tiles that begin with the same rows trail each other, which takes
/// long where columns are short; then it helps that neighbours belong to other sequences, as many as the L2 cache has room for. Only
/// the device knows how much of a mask is live.
struct SectionSize {
  const int32_t* key_counts;  ///< live granules of each key tile of the plan's first mask
  float granules;             ///< of a mask, live or not
  float sequences_in_cache;   ///< if all of a mask is live
  uint32_t dense, most;       ///< for masks that are mostly live; for any
  uint32_t* result;           ///< null: nobody asks
};

struct RowParams {
  Rows out, dout, lse, dlse;
  RowVectors rows;
  RowGradients row_gradients;
  PlanBits plan;
  bool dense;      ///< every key tile contributes to every query tile
  uint32_t* next;  ///< Schedule::next
  SectionSize section;
  int32_t seqlen_q;
  uint32_t row_tiles, key_tiles, heads;
  float scale;
};

/// For the pass that adds up the parts of dk and dv: see BackwardParams.
struct KeyParams {
  Rows dk, dv;
  const float* parts;
  uint32_t heads_kv, splits, key_tiles;
  int32_t seqlen_k;
  float scale;
};

}  // namespace flashmask::sm90::grad
