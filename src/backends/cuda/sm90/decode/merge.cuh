// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/ptx/registers.cuh"
#include "backends/cuda/sm90/decode/traits.cuh"

namespace flashmask::sm90 {

/// The place of a unit's row in the call's tensors.
struct RowPlace {
  int64_t batch, row;
  __device__ __forceinline__ RowPlace(const DecodeParams& p, const Work& work, int32_t row_of_tile)
      : batch(p.call.is_packed ? 0 : work.tile.request),
        row(work.tile.rows_begin + work.tile.first_row + row_of_tile) {}
};
/// The query head that is a unit's n-th.
__device__ __forceinline__ int64_t query_head(const DecodeParams& p, const Work& work, int32_t n) {
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

/// The partial results of a unit, in ascending order of keys.
template <typename Traits>
class PartialResults {
 public:
  static constexpr int kColumns = Traits::kVDim, kFloats = cuda::partial_floats(kColumns);
  /// Floats: packed rows of weighted values, then largest scores, then sums of weights.
  __device__ __forceinline__ static float* values(const DecodeParams& p, int32_t partial) {
    return p.plan.partials + int64_t{partial} * kFloats;
  }
  __device__ __forceinline__ static float* largest(float* values) { return values + Traits::kRows * kColumns; }
  __device__ __forceinline__ static float* sums(float* values) { return largest(values) + Traits::kRows; }

  /// Folds the partial results of one packed row, with all lanes of a warp, and stores the row.
  __device__ __forceinline__ static void merge_row(const DecodeParams& p, const Work& work, int row) {
    Sum sum;
    Part parts[kAtOnce];
    const auto in_row = static_cast<int32_t>(row * kColumns + 2 * ptx::reload_lane());
    float* from = values(p, p.plan.most_shares + work.first_share);
    parts[0].load(from + in_row, sums(from) + row);
    sum.add(parts[0]);
    // The others' are a constant apart, so that their addresses take no registers.
    from = values(p, work.first_share + 1);
    const float *value = from + in_row, *of_row = sums(from) + row;
    for (int32_t left = work.last_share - work.first_share; left > 0; left -= kAtOnce) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (i < left) parts[i].load(value + i * kFloats, of_row + i * kFloats);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (i < left) sum.add(parts[i]);
      value += kAtOnce * kFloats;
      of_row += kAtOnce * kFloats;
    }
    store(p, work, row, sum);
  }

 private:
  static constexpr int kPairs = kColumns / 64;  ///< a lane's pairs of columns
  /// Partial results under way, as many as registers hold.
  static constexpr int kAtOnce = kColumns <= 64 ? 5 : kColumns <= 128 ? 6 : kColumns <= 192 ? 2 : 1;

  struct Part {
    float largest, sum;
    float2 out[kPairs];
    /// `values` is the lane's first pair in the row, `sums` the row's.
    __device__ __forceinline__ void load(const float* values, const float* sums) {
      largest = __ldcg(sums - Traits::kRows);
      sum = __ldcg(sums);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) out[i] = __ldcg(reinterpret_cast<const float2*>(values) + 32 * i);
    }
  };
  struct Sum {
    float largest = -INFINITY, sum = 0;
    float2 out[kPairs] = {};
    __device__ __forceinline__ void add(const Part& part) {
      const float most = fmaxf(largest, part.largest), none = most == -INFINITY ? 0.f : most;
      const float own = ptx::exp2_approx(largest - none), weight = ptx::exp2_approx(part.largest - none);
      largest = most;
      sum = sum * own + part.sum * weight;
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        out[i].x = out[i].x * own + part.out[i].x * weight;
        out[i].y = out[i].y * own + part.out[i].y * weight;
      }
    }
  };

  __device__ __forceinline__ static void store(const DecodeParams& p, const Work& work, int row, const Sum& sum) {
    using Element = typename Traits::Element;
    const int64_t head = query_head(p, work, row % work.tile.head_count);
    const RowEnd end = end_row(sum.largest, sum.sum, p.sink.template of_head<Element>(head));
    const RowPlace place(p, work, row / work.tile.head_count);
    Element* const to = p.out.at<Element>(place.batch, place.row, head);
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      const int32_t column = 2 * (static_cast<int32_t>(ptx::reload_lane()) + 32 * n);
      if (column < p.head_dim_v)
        *reinterpret_cast<uint32_t*>(to + column) =
            ptx::pack<Element>(sum.out[n].x * end.factor, sum.out[n].y * end.factor);
    }
    if (p.lse.data && ptx::reload_lane() == 0) *p.lse.at<float>(place.batch, place.row, head) = end.lse;
  }
};

}  // namespace flashmask::sm90
