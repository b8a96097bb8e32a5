// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/sm90/backward/params.h"

namespace flashmask::sm90::grad {

struct RowParams {
  Rows out, dout, lse, dlse;
  RowVectors rows;
  RowGradients row_gradients;
  PlanBits plan;
  bool dense;      ///< every key tile contributes to every query tile
  uint32_t* next;  ///< Schedule::next
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
