// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>

#include "backends/cuda/cache/cached_params.h"

namespace flashmask::sm90 {

/// How TMA reads a cache; unset where keys are gathered.
struct CacheMaps {
  CUtensorMap k, v;
};

struct DecodeParams : CacheMaps, cuda::CachedParams {};

}  // namespace flashmask::sm90
