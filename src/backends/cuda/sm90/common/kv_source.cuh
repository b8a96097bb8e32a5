// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace flashmask::sm90 {

/// The policy KvSource: the row, and the entry of the outermost dimension, at which a tile of kKeys keys begins in the
/// tensor maps of K and V. Here the maps are of K and V themselves, [batch, seqlen_k, heads_kv, head_dim]; rows past
/// the last are read as zeros.
struct TensorMapKv {
  template <int kKeys>
  __device__ __forceinline__ static int32_t row(int32_t key_tile) {
    return key_tile * kKeys;
  }
  template <typename Params>
  __device__ __forceinline__ static int32_t entry(const Params&, int32_t /*key_tile*/, int32_t batch) {
    return batch;
  }
};

}  // namespace flashmask::sm90
