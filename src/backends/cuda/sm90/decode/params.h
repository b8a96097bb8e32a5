// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>

#include "backends/cuda/cache/cached_params.h"

namespace flashmask::sm90 {

/// How TMA reads a cache; unset where keys are gathered.
struct CacheMaps {
  CUtensorMap k, v;
};

struct DecodeParams : CacheMaps, cuda::CachedParams {
  CUtensorMap query_boxes;  ///< q, heads within rows, in boxes of a tall tile's packed rows; unset without boxes
  int32_t query_box_rows;   ///< packed rows of a box; 0: the query warp copies them
};

}  // namespace flashmask::sm90
