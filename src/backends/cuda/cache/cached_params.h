// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/cache/work.h"
#include "backends/cuda/device/feature_params.h"
#include "call/sequence_view.h"

namespace flashmask::cuda {

/// A tensor of the call's rows: element (request b, row i, head h, column c), or of packed rows with b = 0 and i
/// counted through all requests. Strides in elements.
struct CallRows {
  void* data;
  int64_t batch_stride, row_stride, head_stride;

#if defined(__CUDACC__)
  template <typename T>
  __device__ __forceinline__ T* at(int64_t b, int64_t row, int64_t head) const {
    return static_cast<T*>(data) + b * batch_stride + row * row_stride + head * head_stride;
  }
#endif
};

/// Factors of stored keys or values, by page, row of the page and head: a stride of 0 broadcasts. Null: none.
struct CacheScale {
  const float* data;
  int64_t page_stride, row_stride, head_stride;

#if defined(__CUDACC__)
  /// True if keys of a head may have other factors than each other.
  __device__ __forceinline__ bool differs_by_key() const { return data && (page_stride != 0 || row_stride != 0); }
  __device__ __forceinline__ float at(int64_t page, int64_t row, int64_t head) const {
    return data ? __ldg(data + page * page_stride + row * row_stride + head * head_stride) : 1.f;
  }
#endif
};

/// A call over a cache, as the attention kernels of every architecture read it.
struct CachedParams {
  CallRows k_rows, v_rows;  ///< by page, row of the page and head
  CallRows q, out, lse;     ///< lse: null data if nobody wants it
  CachedView call;
  WorkPlan plan;
  int32_t head_dim, head_dim_v;
  int32_t box_keys;  ///< keys of a box of the tensor maps: divides page_size and a slot's keys; 1 without them
  bool gathers;      ///< keys and values come key by key, not in boxes of TMA
  bool keys_aligned, rows_aligned;  ///< to 16 bytes: rows of K and V, of q and out
  int32_t pages, page_size;
  uint32_t page_multiplier, page_shift;  ///< a key / page_size by a product, see division_by
  float scale_log2;                      ///< log2(e) * the scores' unit, at least a tiny number
  float score_of_bit;                    ///< 1 / scale_log2
  SharedFeatureParams features;
  AlibiParams alibi;  ///< positions aside, which are the sequences'
  CacheScale k_scale, v_scale;

#if defined(__CUDACC__)
  __device__ __forceinline__ int32_t key_page(int32_t key) const {
    return static_cast<int32_t>((uint64_t{static_cast<uint32_t>(key)} * page_multiplier) >> page_shift);
  }
  /// True if scores are more than products.
  __device__ __forceinline__ bool changes_scores() const { return features.changes_products() || alibi.is_set(); }
  /// True if distances of positions are needed for a tile whatever its class: they are ALiBi's.
  __device__ __forceinline__ bool needs_positions() const {
    return alibi.is_set() && (call.q_pos.defined() || call.tail_depth.defined());
  }
  /// True if a head's keys may have other factors than each other, or its values. That of a table's only page may be of
  /// nothing, as may entries that name no page.
  __device__ __forceinline__ bool has_factors_by_key() const {
    return k_scale.differs_by_key() || v_scale.differs_by_key() || (call.has_tables() && pages < 2);
  }
  /// Otherwise the factor of a head's keys, and of its values. A sequence without keys has none.
  __device__ __forceinline__ float2 factors_of(int32_t keys, int32_t kv_head) const {
    return keys > 0 ? float2{k_scale.at(0, 0, kv_head), v_scale.at(0, 0, kv_head)} : float2{1, 0};
  }
  /// The view of a tile's request.
  __device__ __forceinline__ SequenceView sequence_of(const RowTile& tile) const {
    return SequenceView(call, tile.request,
                        {{tile.rows_begin, tile.rows_count}, tile.first_entry, tile.keys, tile.tail});
  }
#endif
};

}  // namespace flashmask::cuda
