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

#if defined(__CUDACC__)
  /// True if the factors of e4m3 differ by page or token; otherwise a key head has one of keys and one of values.
  __device__ __forceinline__ bool has_factors_by_key() const {
    return k_scale.differs_by_key() || v_scale.differs_by_key();
  }
#endif
};

}  // namespace flashmask::sm90
