// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/device/mask_params.h"
#include "backends/cuda/device/tensor_rows.h"

namespace flashmask::cuda {

// In deterministic mode dq is summed up in integers, whose sum does not depend on the order. A row's parts are
// multiplied by a power of two so that no sum of them leaves the range:
//   |sum of dS_j K_jd| <= (|dout| max_j |V_j| / (1 - dropout) + |delta|) max_j,d |K_jd|,
// as dS_j = P_j (dP_j - delta), |dP_j| <= |dout| |V_j|, and the P of a row add up to at most 1.

/// The largest |K_jd| and |V_j| of keys, leaving out infinities and NaN: rows that see one have no finite dq.
struct KeyMagnitudes {
  float k, v;
};

/// Parameters of the kernel that measures visible keys, with a block for each kKeys keys of a key head.
struct KeyMagnitudeParams {
  static constexpr int kKeys = 256;
  TensorRows k, v;
  KeyMagnitudes* magnitudes;  ///< [batch, heads_kv, blocks]
  VisibleExtents extents;
  int32_t seqlen_k;
  uint32_t blocks, heads;  ///< blocks per key head; key heads
};

/// Parameters of the pass over rows, which computes scales from the magnitudes.
struct RowScaleParams {
  const KeyMagnitudes* magnitudes;  ///< as above; null: sums are floats, and rows have no scale
  uint32_t blocks, heads, query_heads_per_key_head;
  float kept_scale;  ///< 1 / (1 - dropout)
};

}  // namespace flashmask::cuda
