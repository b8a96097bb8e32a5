// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/cache/merge.cuh"
#include "backends/cuda/device/softcap.cuh"
#include "backends/cuda/fragments/fragments.cuh"
#include "backends/cuda/ptx/async_arrive.cuh"

namespace flashmask::cuda {

/// A packed row of a unit: its row of the tile, or -1 if it is not there, and its head of the unit.
struct PackedPlace {
  int32_t packed, row, head;
};

/// Lowers a slab's scores by a slope times the distance of positions: slope and row of the thread's two rows,
/// position_of(column) of a key.
template <int kScores, typename PositionOf>
__device__ __forceinline__ void lower(float (&s)[kScores], const float (&slope)[2], const int32_t (&row)[2],
                                      const PositionOf& position_of) {
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    const int half = i / 2 % 2;
    const int32_t key = position_of(Slab::column(i));
    const uint32_t distance = static_cast<uint32_t>(max(key, row[half])) - static_cast<uint32_t>(min(key, row[half]));
    s[i] = __fmaf_rn(-slope[half], static_cast<float>(distance), s[i]);
  }
}

/// Lowers a slab's scores by ALiBi's biases. place_of(half) is the place of one of the thread's two rows; `positions`
/// has the keys' positions, if they are not first_key and so on.
template <int kScores, typename PlaceOf>
__device__ __forceinline__ void apply_alibi(const CachedParams& p, const UnitPart& work, const PlaceOf& place_of,
                                            const int32_t* positions, int32_t first_key, float (&s)[kScores]) {
  const SequenceView sequence = p.sequence_of(work.tile);
  float slope[2];
  int32_t row[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const PackedPlace place = place_of(half);
    row[half] = static_cast<int32_t>(sequence.first_row()) + work.tile.first_row + max(place.row, 0);
    if (p.needs_positions() && row[half] >= 0) row[half] = static_cast<int32_t>(sequence.row_position(row[half]));
    const auto head = static_cast<uint32_t>(query_head(p, work, place.head));
    slope[half] =
        __ldg(p.alibi.slopes + p.alibi.index(static_cast<uint32_t>(work.tile.request), head)) * p.alibi.per_unit;
  }
  if (p.needs_positions()) {
    lower(s, slope, row, [&](int key) { return positions[key]; });
  } else {
    lower(s, slope, row, [&](int key) { return first_key + key; });
  }
}

/// Makes scores of a slab's products: the tanh of a softcap, then ALiBi's biases by bias().
template <typename Product, int kScores, typename Bias>
__device__ __forceinline__ void change_scores(const CachedParams& p, float (&s)[kScores], const Bias& bias) {
  if (p.features.softcap.is_set()) apply_softcap<Product>(s, p.features.softcap.factor);
  if (!p.alibi.is_set()) return;
  bias();
}

/// The columns of a thread's pairs of O, as a product leaves them.
struct NaturalColumns {
  __device__ __forceinline__ static bool has_pair(int n, int32_t columns) { return 8 * n < columns; }
  /// From the thread's first column to that of its n-th pair.
  __device__ __forceinline__ static int step(int n) { return 8 * n; }
  __device__ __forceinline__ static int first() { return 2 * Slab::column_pair(); }
  template <int kOutputs>
  __device__ __forceinline__ static float2 pair(const float (&o)[kOutputs], int n, int half) {
    return make_float2(o[4 * n + 2 * half], o[4 * n + 2 * half + 1]);
  }
};
/// Even columns of each 16 are the first eight of a product, odd ones the others.
struct InterleavedColumns {
  __device__ __forceinline__ static bool has_pair(int n, int32_t columns) { return first() + step(n) < columns; }
  __device__ __forceinline__ static int step(int n) { return n / 2 * 16 + n % 2 * 2; }
  __device__ __forceinline__ static int first() { return 4 * Slab::column_pair(); }
  template <int kOutputs>
  __device__ __forceinline__ static float2 pair(const float (&o)[kOutputs], int n, int half) {
    const int at = n / 2 * 8 + 2 * half + n % 2;
    return make_float2(o[at], o[at + 4]);
  }
};

/// Stores one of a thread's two rows of O that is there: the result, or a unit's part of it. `largest` is the row's
/// largest score (log2), `sum` its weights' sum.
template <typename Element, int kColumns, typename Columns = NaturalColumns, int kRows = kPackedRows>
struct RowStore {
  using Partials = PartialResults<Element, kColumns, kRows>;
  const CachedParams& p;
  const UnitPart& work;

  template <int kOutputs>
  __device__ __forceinline__ void store(const PackedPlace& packed, int half, const float (&o)[kOutputs], float largest,
                                        float sum) const {
    if (work.is_final()) {
      store_final(packed, half, o, largest, sum);
    } else {
      store_partial(packed, half, o, largest, sum);
    }
  }

 private:
  template <int kOutputs>
  __device__ __forceinline__ void store_final(const PackedPlace& packed, int half, const float (&o)[kOutputs],
                                              float largest, float sum) const {
    const int64_t head = query_head(p, work, packed.head);
    const RowEnd end = end_row(largest, sum, p.features.sink.template of_head<Element>(head));
    const RowPlace place(p, work, packed.row);
    Element* const to = p.out.at<Element>(place.batch, place.row, head) + Columns::first();
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
      const float2 pair = Columns::pair(o, n, half);
      if (Columns::has_pair(n, p.head_dim_v))
        RowCopy{p.rows_aligned}.store_pair(to + Columns::step(n), pair.x * end.factor, pair.y * end.factor);
    }
    if (p.lse.data && Slab::column_pair() == 0) *p.lse.at<float>(place.batch, place.row, head) = end.lse;
  }
  template <int kOutputs>
  __device__ __forceinline__ void store_partial(const PackedPlace& packed, int half, const float (&o)[kOutputs],
                                                float largest, float sum) const {
    const PartialRow row = Partials::row(p, work, packed.packed, packed.row, packed.head);
    float* const to = row.values + Columns::first();
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n)
      __stcg(reinterpret_cast<float2*>(to + Columns::step(n)), Columns::pair(o, n, half));
    if (Slab::column_pair() == 0) {
      __stcg(row.largest, largest);
      __stcg(row.sum, sum);
    }
  }
};

/// Counts a partial result: `is_last` becomes 1 in the CTA that counts the unit's last, else 0. One thread calls it,
/// after all of the CTA have stored theirs.
__device__ __forceinline__ void count_partial(const CachedParams& p, const UnitPart& work, uint32_t& is_last) {
  uint32_t* const count = p.plan.arrived + work.counter;
  const auto others = static_cast<uint32_t>(work.parts - 1);
  is_last = ptx::add_acquire_release(count, 1) == others;
  if (is_last) *count = 0;  // for the next call with the plan
}

/// Adds up a unit's partial results with kWarps warps, of which the caller is the warp-th, and stores them.
template <typename Element, int kColumns, int kWarps, int kRows = kPackedRows>
__device__ __forceinline__ void merge_unit(const CachedParams& p, const UnitPart& work, int32_t warp) {
  using Partials = PartialResults<Element, kColumns, kRows>;
#pragma unroll 1
  for (int32_t row = warp * Partials::kRowsAtOnce; row < work.count(); row += kWarps * Partials::kRowsAtOnce)
    Partials::merge_rows(p, work, row);
}

}  // namespace flashmask::cuda
