// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/cache/merge.cuh"
#include "backends/cuda/device/launch_overlap.cuh"

namespace flashmask::cuda {

inline constexpr int kForestMergeWarps = 8, kForestMergeThreads = 32 * kForestMergeWarps;

/// The results of a row and query head: those of its row tile of each size, in ascending order of shares.
class ForestResults {
 public:
  /// Row i of the call, and a query head, by all lanes of a warp: each of the first ones finds a size's.
  __device__ __forceinline__ ForestResults(const CachedParams& p, int32_t i, int32_t head, int32_t columns)
      : p_(p), columns_(columns) {
    const auto lane = static_cast<int32_t>(threadIdx.x % 32);
    int32_t first = 0, step = 0, count = 0;
    if (lane < kTileLevels) {
      const TileLevel& level = p.plan.levels[lane];
      const int32_t t = i / level.rows;
      const UnitResults results = p.plan.results[(level.first_slot + t) * p.plan.heads_kv + head / p.plan.group];
      count = results.count;
      first = results.first_row + (i - t * level.rows) * p.plan.group + head % p.plan.group;
      step = level.packed_rows;
    }
#pragma unroll
    for (int n = 0; n < kTileLevels; ++n) {
      first_[n] = __shfl_sync(0xffffffff, first, n);
      step_[n] = __shfl_sync(0xffffffff, step, n);
      end_[n] = __shfl_sync(0xffffffff, count, n) + (n > 0 ? end_[n - 1] : 0);
    }
  }

  __device__ __forceinline__ int32_t count() const { return end_[kTileLevels - 1]; }
  /// The n-th one's largest score, sum of weights, and four columns; one that is not there has no weight.
  __device__ __forceinline__ float largest(int32_t n) const { return n < count() ? __ldcg(at(n).largest) : -INFINITY; }
  __device__ __forceinline__ float sum(int32_t n) const { return n < count() ? __ldcg(at(n).sum) : 0.f; }
  __device__ __forceinline__ float4 values(int32_t n, int32_t column) const {
    return n < count() && column < columns_ ? __ldcg(reinterpret_cast<const float4*>(at(n).values + column))
                                            : float4{0, 0, 0, 0};
  }

 private:
  __device__ __forceinline__ PartialRow at(int32_t n) const {
    int32_t row = first_[0] + n * step_[0];
#pragma unroll
    for (int level = 1; level < kTileLevels; ++level)
      if (n >= end_[level - 1]) row = first_[level] + (n - end_[level - 1]) * step_[level];
    return result_row(p_.plan, row, columns_);
  }

  const CachedParams& p_;
  int32_t columns_;
  int32_t first_[kTileLevels], step_[kTileLevels], end_[kTileLevels];
};

/// Four columns of some of a row's results, whose loads are under way at once: a round to L2 takes longer than all the
/// arithmetic.
struct ResultValues {
  static constexpr int kCount = 8;
  float4 values[kCount];
  __device__ __forceinline__ void load(const ForestResults& results, int32_t first, int32_t column) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) values[n] = results.values(first + n, column);
  }
  /// Adds them to `out`. Lane n % 32 has the weight of the n-th result.
  __device__ __forceinline__ void add(float weight, int32_t first, float4& out) const {
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const float own = __shfl_sync(0xffffffff, weight, (first + n) % 32);
      out.x = __fmaf_rn(values[n].x, own, out.x);
      out.y = __fmaf_rn(values[n].y, own, out.y);
      out.z = __fmaf_rn(values[n].z, own, out.z);
      out.w = __fmaf_rn(values[n].w, own, out.w);
    }
  }
};

template <typename F>
__device__ __forceinline__ float over_warp(float x, const F& f) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = f(x, __shfl_xor_sync(0xffffffff, x, step));
  return x;
}

/// Merges the results of a row and query head, with all lanes of a warp, and stores them.
template <typename Element>
__device__ __forceinline__ void merge_row(const CachedParams& p, const ForestResults& results, int64_t batch,
                                          int64_t row, int32_t head, int32_t columns) {
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  ResultValues values;
  values.load(results, 0, 4 * lane);
  const float first_largest = results.largest(lane), first_sum = results.sum(lane);
  float largest = first_largest;
  for (int32_t n = lane + 32; n < results.count(); n += 32) largest = fmaxf(largest, results.largest(n));
  largest = over_warp(largest, [](float x, float y) { return fmaxf(x, y); });
  const float most = largest == -INFINITY ? 0.f : largest, first_weight = ptx::exp2_approx(first_largest - most);
  float sum = first_weight * first_sum;
  for (int32_t n = lane + 32; n < results.count(); n += 32)
    sum += ptx::exp2_approx(results.largest(n) - most) * results.sum(n);
  sum = over_warp(sum, [](float x, float y) { return x + y; });
  const RowEnd end = end_row(largest, sum, p.features.sink.template of_head<Element>(head));
  Element* const to = p.out.at<Element>(batch, row, head);
#pragma unroll 1
  for (int32_t column = 4 * lane; column - 4 * lane < columns; column += 128) {
    float weight = first_weight;
    float4 out{0, 0, 0, 0};
#pragma unroll 1
    for (int32_t first = 0; first < results.count(); first += ResultValues::kCount) {
      if (first > 0 || column >= 128) values.load(results, first, column);
      if (first > 0 && first % 32 == 0) weight = ptx::exp2_approx(results.largest(first + lane) - most);
      values.add(weight, first, out);
    }
    if (column >= p.head_dim_v) continue;
    const RowCopy copy{p.rows_aligned};
    copy.store_pair(to + column, out.x * end.factor, out.y * end.factor);
    copy.store_pair(to + column + 2, out.z * end.factor, out.w * end.factor);
  }
  if (p.lse.data && lane == 0) *p.lse.at<float>(batch, row, head) = end.lse;
}

/// Merges the results of all rows of a forest, a row and query head a warp.
template <typename Element>
__device__ inline void merge_forest(const CachedParams& p, int32_t columns) {
  const RequestRows rows = SequenceView(p.call, 0).rows();
  const int32_t heads = p.plan.group * p.plan.heads_kv;
  const int64_t n = int64_t{blockIdx.x} * kForestMergeWarps + threadIdx.x / 32, i = quotient(n, heads);
  const auto head = static_cast<int32_t>(n - i * heads);
  const bool is_there = i < rows.count;
  // The kernel before let this one begin when it had waited for the plan.
  const ForestResults results(p, is_there ? static_cast<int32_t>(i) : 0, head, columns);
  wait_for_previous();
  allow_next();
  if (is_there) merge_row<Element>(p, results, 0, rows.begin + i, head, columns);
}

}  // namespace flashmask::cuda
