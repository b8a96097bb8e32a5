// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/cache/merge.cuh"
#include "backends/cuda/cache/unit_walk.cuh"
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
      const int32_t t = i / level.rows, index = p.plan.listed[level.first_slot + t];
      if (index >= 0) {
        UnitWalk unit;
        unit.find(p.plan, index, head / p.plan.group);
        const UnitWalk::Shares in = unit.shares(p.plan, p.plan.shares[0]);
        count = in.last - in.first + 1;
        first = unit.first_result(in.first) + (i - t * level.rows) * p.plan.group + head % p.plan.group;
        step = level.packed_rows;
      }
    }
#pragma unroll
    for (int n = 0; n < kTileLevels; ++n) {
      first_[n] = __shfl_sync(0xffffffff, first, n);
      step_[n] = __shfl_sync(0xffffffff, step, n);
      end_[n] = __shfl_sync(0xffffffff, count, n) + (n > 0 ? end_[n - 1] : 0);
    }
  }

  __device__ __forceinline__ int32_t count() const { return end_[kTileLevels - 1]; }
  /// The n-th result.
  __device__ __forceinline__ PartialRow at(int32_t n) const {
    int32_t row = first_[0] + n * step_[0];
#pragma unroll
    for (int level = 1; level < kTileLevels; ++level)
      if (n >= end_[level - 1]) row = first_[level] + (n - end_[level - 1]) * step_[level];
    return result_row(p_.plan, row, columns_);
  }
  __device__ __forceinline__ float largest(int32_t n) const { return n < count() ? __ldcg(at(n).largest) : -INFINITY; }
  __device__ __forceinline__ float sum(int32_t n) const { return n < count() ? __ldcg(at(n).sum) : 0.f; }
  __device__ __forceinline__ float4 values(int32_t n, int32_t column) const {
    return n < count() && column < columns_ ? __ldcg(reinterpret_cast<const float4*>(at(n).values + column))
                                            : float4{0, 0, 0, 0};
  }

 private:
  const CachedParams& p_;
  int32_t columns_;
  int32_t first_[kTileLevels], step_[kTileLevels], end_[kTileLevels];
};

template <typename F>
__device__ __forceinline__ float over_warp(float x, const F& f) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = f(x, __shfl_xor_sync(0xffffffff, x, step));
  return x;
}

/// Adds up a row's results, four columns in each lane, with the weights that they have beside the score `most`.
__device__ __forceinline__ float4 add_results(const ForestResults& results, float most, int32_t column) {
  constexpr int kAtOnce = 4;  // a round to L2 takes longer than the arithmetic
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  float4 out{0, 0, 0, 0};
  float weight = 0;
#pragma unroll 1
  for (int32_t first = 0; first < results.count(); first += kAtOnce) {
    float4 values[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) values[n] = results.values(first + n, column);
    if (first % 32 == 0) weight = ptx::exp2_approx(results.largest(first + lane) - most);
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const float of_result = __shfl_sync(0xffffffff, weight, (first + n) % 32);
      out.x = __fmaf_rn(values[n].x, of_result, out.x);
      out.y = __fmaf_rn(values[n].y, of_result, out.y);
      out.z = __fmaf_rn(values[n].z, of_result, out.z);
      out.w = __fmaf_rn(values[n].w, of_result, out.w);
    }
  }
  return out;
}

/// Merges the results of a row and query head, a warp each, and stores them.
template <typename Element>
__device__ inline void merge_forest(const CachedParams& p, int32_t columns) {
  wait_for_previous();
  allow_next();
  const SequenceView sequence(p.call, 0);
  const int32_t heads = p.plan.group * p.plan.heads_kv, lane = static_cast<int32_t>(threadIdx.x % 32);
  const int64_t n = int64_t{blockIdx.x} * kForestMergeWarps + threadIdx.x / 32, i = quotient(n, heads);
  if (i >= sequence.rows().count) return;
  const auto head = static_cast<int32_t>(n - i * heads);
  const ForestResults results(p, static_cast<int32_t>(i), head, columns);
  float largest = -INFINITY, sum = 0;
  for (int32_t at = lane; at < results.count(); at += 32) largest = fmaxf(largest, results.largest(at));
  largest = over_warp(largest, [](float x, float y) { return fmaxf(x, y); });
  const float most = largest == -INFINITY ? 0.f : largest;
  for (int32_t at = lane; at < results.count(); at += 32)
    sum += ptx::exp2_approx(results.largest(at) - most) * results.sum(at);
  sum = over_warp(sum, [](float x, float y) { return x + y; });
  const RowEnd end = end_row(largest, sum, p.features.sink.template of_head<Element>(head));
  const int64_t batch = 0, row = sequence.rows().begin + i;
  Element* const to = p.out.at<Element>(batch, row, head);
#pragma unroll 1
  for (int32_t column = 4 * lane; column - 4 * lane < columns; column += 128) {
    const float4 out = add_results(results, most, column);
    if (column >= p.head_dim_v) continue;
    const RowCopy copy{p.rows_aligned};
    copy.store_pair(to + column, out.x * end.factor, out.y * end.factor);
    copy.store_pair(to + column + 2, out.z * end.factor, out.w * end.factor);
  }
  if (p.lse.data && lane == 0) *p.lse.at<float>(batch, row, head) = end.lse;
}

}  // namespace flashmask::cuda
