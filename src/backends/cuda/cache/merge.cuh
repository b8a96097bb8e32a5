// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/cache/cached_params.h"
#include "backends/cuda/cache/row_copy.cuh"
#include "backends/cuda/ptx/registers.cuh"

namespace flashmask::cuda {

/// The place of a unit's row in the call's tensors.
struct RowPlace {
  int64_t batch, row;
  __device__ __forceinline__ RowPlace(const CachedParams& p, const UnitPart& work, int32_t row_of_tile)
      : batch(p.call.is_packed ? 0 : work.tile.request),
        row(work.tile.rows_begin + work.tile.first_row + row_of_tile) {}
};
/// The query head that is a unit's n-th.
__device__ __forceinline__ int64_t query_head(const CachedParams& p, const UnitPart& work, int32_t n) {
  return int64_t{work.kv_head} * p.plan.group + work.tile.first_head + n;
}

/// A row's softmax, its sink included: the factor of its sum of weighted values, and its lse. `largest` is the row's
/// largest score and `sum` that of its weights, both log2; -inf: it saw nothing.
struct RowEnd {
  float factor, lse;
};
__device__ __forceinline__ RowEnd end_row(float largest, float sum, float sink) {
  constexpr float kLog2E = 1.44269504088896341f, kLn2 = 0.693147180559945309f;
  constexpr float kMost = 3e38f;  // not infinity: differences of infinities are NaN
  const float of_sink = ptx::min_or_nan(sink * kLog2E, kMost), most = fmaxf(largest, of_sink),
              none = most == -INFINITY ? 0.f : most;
  const float unit = ptx::exp2_approx(largest - none), all = sum * unit + ptx::exp2_approx(of_sink - none);
  return {largest == -INFINITY ? 0.f : unit / all,
          of_sink > largest ? sink + log2f(all) * kLn2 : (largest + log2f(all)) * kLn2};
}

/// The place of a packed row's partial result.
struct PartialRow {
  float *values, *largest, *sum;
};

/// The n-th of the rows of all splits, or of a forest's results, of which there are less than 2^31, of so many columns.
__device__ __forceinline__ PartialRow result_row(const WorkPlan& plan, int32_t n, int32_t columns) {
  float* const others = plan.partials + int64_t{plan.splits * plan.split_rows} * columns + 2 * int64_t{n};
  return {plan.partials + int64_t{n} * columns, others, others + 1};
}

/// The partial results of a unit of at most kRows packed rows, in ascending order of keys, in which they are added up.
template <typename Element, int kColumns, int kRows = kPackedRows>
class PartialResults {
 public:
  static constexpr int kFloats = partial_floats(kRows, kColumns);
  /// Floats: packed rows of weighted values, then largest scores, then sums of weights.
  __device__ __forceinline__ static float* values(const CachedParams& p, int32_t partial) {
    return p.plan.partials + int64_t{partial} * kFloats;
  }
  __device__ __forceinline__ static float* largest(float* values) { return values + kRows * kColumns; }
  __device__ __forceinline__ static float* sums(float* values) { return largest(values) + kRows; }
  /// The place of a packed row of the unit's own result, of a row and head of the tile.
  __device__ __forceinline__ static PartialRow row(const CachedParams& p, const UnitPart& work, int32_t packed,
                                                   int32_t row, int32_t head) {
    if (p.plan.is_forest()) return split_row(p, work.partial + packed);
    if (p.plan.invariant_blocks > 0)
      return split_row(p, work.partial * p.plan.split_rows + call_row(p, work, row, head));
    float* const all = values(p, work.partial);
    return {all + packed * kColumns, largest(all) + packed, sums(all) + packed};
  }

  /// Rows that a warp adds up at a time, each in kLanes lanes.
  static constexpr int kLanes = kColumns <= 64 ? 16 : 32, kRowsAtOnce = 32 / kLanes;

  /// Adds up the partial results of packed rows from `first` on, with all lanes of a warp, and stores them.
  __device__ __forceinline__ static void merge_rows(const CachedParams& p, const UnitPart& work, int32_t first) {
    const auto in_warp = static_cast<int32_t>(ptx::reload_lane()), row = first + in_warp / kLanes;
    const Sum sum = p.plan.invariant_blocks > 0 ? fold_parts(p, work, first) : add_parts(p, work, first);
    if (row < work.tile.row_count * work.tile.head_count) store(p, work, in_warp % kLanes, row, sum);
  }

 private:
  struct Sum;

  /// A lane has the weights of some parts and some columns of every part, which are loaded many at a time: each round
  /// takes longer than all the arithmetic.
  __device__ __forceinline__ static Sum add_parts(const CachedParams& p, const UnitPart& work, int32_t row) {
    const Places places(p, work, row);
    Values values;
    values.load(places, 0);
    const int32_t lane = places.lane;
    const float first_largest = places.largest_of(lane), first_sum = places.sum_of(lane);
    Sum sum{first_largest};
    for (int32_t n = lane + kLanes; n < places.parts; n += kLanes)
      sum.largest = fmaxf(sum.largest, places.largest_of(n));
    sum.largest = over_lanes(sum.largest, [](float x, float y) { return fmaxf(x, y); });
    const float none = sum.largest == -INFINITY ? 0.f : sum.largest;
    float weight = ptx::exp2_approx(first_largest - none);
    sum.sum = weight * first_sum;
    values.add(weight, 0, sum);
#pragma unroll 1
    for (int32_t at = kAtOnce; at < places.parts; at += kAtOnce) {
      values.load(places, at);
      if (at % kLanes == 0) {
        weight = ptx::exp2_approx(places.largest_of(at + lane) - none);
        sum.sum += weight * places.sum_of(at + lane);
      }
      values.add(weight, at, sum);
    }
    sum.sum = over_lanes(sum.sum, [](float x, float y) { return x + y; });
    return sum;
  }

  /// Likewise with batch_invariant: one part after the other, so that the order is that of a row's keys. A part of
  /// which the row sees nothing leaves every bit as it is, since it may be there for another row.
  __device__ __forceinline__ static Sum fold_parts(const CachedParams& p, const UnitPart& work, int32_t row) {
    const SplitPlaces places(p, work, row);
    Sum sum{-INFINITY};
    float largest = -INFINITY, weights = 0;  // a part's, of another for each lane
#pragma unroll 1
    for (int32_t at = 0; at < work.parts; at += kAtOnce) {
      Values values;
      values.load(places, at);
      if (at % kLanes == 0) {
        largest = places.largest_of(at + places.lane);
        weights = places.sum_of(at + places.lane);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int from = (at + i) % kLanes;
        sum.fold(__shfl_sync(0xffffffff, largest, from, kLanes), __shfl_sync(0xffffffff, weights, from, kLanes),
                 values.pairs[i]);
      }
    }
    return sum;
  }

  /// The place of a tile's row and head among the packed rows of the call.
  __device__ __forceinline__ static int32_t call_row(const CachedParams& p, const UnitPart& work, int32_t row,
                                                     int32_t head) {
    const RowPlace place(p, work, row);
    const int32_t all =
        static_cast<int32_t>(place.batch) * static_cast<int32_t>(p.call.rows) + static_cast<int32_t>(place.row);
    return all * p.plan.group * p.plan.heads_kv + static_cast<int32_t>(query_head(p, work, head));
  }
  __device__ __forceinline__ static PartialRow split_row(const CachedParams& p, int32_t n) {
    return result_row(p.plan, n, kColumns);
  }

  static constexpr int kPairs = kColumns / 2 / kLanes;  ///< a lane's pairs of columns
  /// Partial results under way, as many as registers hold.
  static constexpr int kAtOnce = kColumns <= 64 ? 16 : kColumns <= 128 ? 8 : 4;
  static_assert(kLanes % kAtOnce == 0, "lanes' weights are those of kLanes parts");

  struct Sum {
    float largest, sum = 0;
    float2 out[kPairs] = {};

    /// Adds the result of keys behind those so far.
    __device__ __forceinline__ void fold(float part_largest, float part_sum, const float2 (&part)[kPairs]) {
      if (part_largest == -INFINITY) return;
      const float most = fmaxf(largest, part_largest), own = ptx::exp2_approx(largest - most),
                  factor = ptx::exp2_approx(part_largest - most);
      largest = most;
      sum = __fmaf_rn(part_sum, factor, sum * own);
#pragma unroll
      for (int n = 0; n < kPairs; ++n) {
        out[n].x = __fmaf_rn(part[n].x, factor, out[n].x * own);
        out[n].y = __fmaf_rn(part[n].y, factor, out[n].y * own);
      }
    }
  };
  /// A row's parts, as a lane finds them; one that is not there has no weight.
  struct Places {
    const float *first, *others;  ///< the first part and the second; the rest follow at equal distances
    int32_t parts, lane, row;
    __device__ __forceinline__ Places(const CachedParams& p, const UnitPart& work, int32_t first_row)
        : first(values(p, p.plan.most_shares + work.counter)),
          others(values(p, work.counter + 1)),
          parts(work.parts),
          lane(static_cast<int32_t>(ptx::reload_lane()) % kLanes),
          row(first_row + static_cast<int32_t>(ptx::reload_lane()) / kLanes) {}
    __device__ __forceinline__ const float* part(int32_t n) const {
      return n == 0 ? first : others + int64_t{n - 1} * kFloats;
    }
    __device__ __forceinline__ float largest_of(int32_t n) const {
      return n < parts ? __ldcg(part(n) + kRows * kColumns + row) : -INFINITY;
    }
    __device__ __forceinline__ float sum_of(int32_t n) const {
      return n < parts ? __ldcg(part(n) + kRows * (kColumns + 1) + row) : 0.f;
    }
    __device__ __forceinline__ float2 pair_of(int32_t n, int pair) const {
      return n < parts ? __ldcg(reinterpret_cast<const float2*>(part(n) + row * kColumns) + lane + kLanes * pair)
                       : make_float2(0, 0);
    }
  };
  /// Likewise those of splits.
  struct SplitPlaces {
    const CachedParams& p;
    int32_t parts, lane, place;
    __device__ __forceinline__ SplitPlaces(const CachedParams& params, const UnitPart& work, int32_t first_row)
        : p(params), parts(work.parts), lane(static_cast<int32_t>(ptx::reload_lane()) % kLanes) {
      const int32_t row = min(first_row + static_cast<int32_t>(ptx::reload_lane()) / kLanes, work.count() - 1);
      place = call_row(params, work, row / work.tile.head_count, row % work.tile.head_count);
    }
    __device__ __forceinline__ PartialRow part(int32_t n) const { return split_row(p, n * p.plan.split_rows + place); }
    __device__ __forceinline__ float largest_of(int32_t n) const {
      return n < parts ? __ldcg(part(n).largest) : -INFINITY;
    }
    __device__ __forceinline__ float sum_of(int32_t n) const { return n < parts ? __ldcg(part(n).sum) : 0.f; }
    __device__ __forceinline__ float2 pair_of(int32_t n, int pair) const {
      return n < parts ? __ldcg(reinterpret_cast<const float2*>(part(n).values) + lane + kLanes * pair)
                       : make_float2(0, 0);
    }
  };
  /// A lane's columns of parts [at, at + kAtOnce).
  struct Values {
    float2 pairs[kAtOnce][kPairs];
    template <typename AnyPlaces>
    __device__ __forceinline__ void load(const AnyPlaces& places, int32_t at) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (int n = 0; n < kPairs; ++n) pairs[i][n] = places.pair_of(at + i, n);
      }
    }
    __device__ __forceinline__ void add(float weight, int32_t at, Sum& sum) const {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float of_part = __shfl_sync(0xffffffff, weight, (at + i) % kLanes, kLanes);
#pragma unroll
        for (int n = 0; n < kPairs; ++n) {
          sum.out[n].x = __fmaf_rn(pairs[i][n].x, of_part, sum.out[n].x);
          sum.out[n].y = __fmaf_rn(pairs[i][n].y, of_part, sum.out[n].y);
        }
      }
    }
  };
  template <typename F>
  __device__ __forceinline__ static float over_lanes(float x, const F& f) {
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) x = f(x, __shfl_xor_sync(0xffffffff, x, step));
    return x;
  }

  __device__ __forceinline__ static void store(const CachedParams& p, const UnitPart& work, int32_t lane, int32_t row,
                                               const Sum& sum) {
    const int64_t head = query_head(p, work, row % work.tile.head_count);
    const RowEnd end = end_row(sum.largest, sum.sum, p.features.sink.template of_head<Element>(head));
    const RowPlace place(p, work, row / work.tile.head_count);
    Element* const to = p.out.at<Element>(place.batch, place.row, head);
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      const int32_t column = 2 * (lane + kLanes * n);
      if (column < p.head_dim_v)
        RowCopy{p.rows_aligned}.store_pair(to + column, sum.out[n].x * end.factor, sum.out[n].y * end.factor);
    }
    if (p.lse.data && lane == 0) *p.lse.at<float>(place.batch, place.row, head) = end.lse;
  }
};

}  // namespace flashmask::cuda
