// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/fragments/fragments.cuh"
#include "backends/cuda/fragments/softmax.cuh"
#include "backends/cuda/sm90/decode/traits.cuh"

namespace flashmask::sm90 {

/// With batch_invariant the result of a tall tile's splits so far, to which the next one's is added as PartialResults
/// adds them. It lies in memory, for registers hold a split's: each thread's sums of weighted values where it alone
/// reads them.
template <typename Traits>
class SplitFold {
 public:
  using Outputs = typename Traits::Outputs;
  __device__ __forceinline__ SplitFold(const DecodeParams& p, const Work& work) : p_(p), work_(work) {
    if (!is_on()) return;
#pragma unroll
    for (int n = 0; n < kLaneSums; ++n) __stcg(sums_at(n), make_float4(0, 0, 0, 0));
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (cuda::Slab::column_pair() == 0) __stcg(row_at(half), make_float2(-INFINITY, 0));
    __syncwarp();
  }

  /// False if the sequence has one split, whose result is final.
  __device__ __forceinline__ bool is_on() const {
    return p_.plan.folds() && work_.tile.keys > p_.plan.invariant_blocks * cuda::kBlockKeys;
  }

  /// Adds a split's result and begins the next one's.
  __device__ __forceinline__ void add(Outputs& o, cuda::RowState& rows) {
    fold(o, rows, [this](int n, const float4& sums) { __stcg(sums_at(n), sums); });
    rows.reset();
#pragma unroll
    for (float& sum : o) sum = 0;
  }
  /// Adds the last split's result: o has that of all of them, and result() its rows'.
  __device__ __forceinline__ void finish(Outputs& o, const cuda::RowState& rows) {
    fold(o, rows, [&o](int n, const float4& sums) {
      o[4 * n] = sums.x, o[4 * n + 1] = sums.y, o[4 * n + 2] = sums.z, o[4 * n + 3] = sums.w;
    });
  }
  /// The largest score (log2) of one of the thread's two rows, and its weights' sum.
  __device__ __forceinline__ float2 result(int half) const { return __ldcg(row_at(half)); }

 private:
  static constexpr int kFloats = cuda::partial_floats(Traits::kRows, Traits::kVDim);
  static constexpr int kLaneSums = static_cast<int>(sizeof(Outputs) / sizeof(float4));
  static constexpr int kAtOnce = kLaneSums <= 16 ? kLaneSums : kLaneSums / 4;

  __device__ __forceinline__ float* memory() const { return p_.plan.partials + int64_t{blockIdx.x} * kFloats; }
  __device__ __forceinline__ float4* sums_at(int n) const {
    return reinterpret_cast<float4*>(memory()) + n * Traits::kConsumerThreads + threadIdx.x;
  }
  __device__ __forceinline__ float2* row_at(int half) const {
    const auto slab = static_cast<int32_t>(threadIdx.x / 32) * cuda::Slab::kRows;
    return reinterpret_cast<float2*>(memory() + Traits::kRows * Traits::kVDim) + slab + cuda::Slab::row(2 * half);
  }

  /// A split of which a row sees nothing leaves every bit as it is, since it may be there for another row.
  template <typename Take>
  __device__ __forceinline__ void fold(const Outputs& o, const cuda::RowState& rows, const Take& take) {
    float own[2], factor[2];
    bool adds[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float largest = rows.row_max[half] * p_.scale_log2, sum = cuda::quad_sum(rows.sum[half]);
      float2 row = result(half);
      adds[half] = largest != -INFINITY;
      const float most = fmaxf(row.x, largest);
      own[half] = ptx::exp2_approx(row.x - most);
      factor[half] = ptx::exp2_approx(largest - most);
      if (adds[half]) row = make_float2(most, __fmaf_rn(sum, factor[half], row.y * own[half]));
      __syncwarp();  // all lanes of the row have read it
      if (cuda::Slab::column_pair() == 0) __stcg(row_at(half), row);
    }
    __syncwarp();
    const auto added = [&](float part, float sum, int half) {
      return adds[half] ? __fmaf_rn(part, factor[half], sum * own[half]) : sum;
    };
#pragma unroll
    for (int first = 0; first < kLaneSums; first += kAtOnce) {
      float4 before[kAtOnce];  // all are under way at once
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) before[n] = __ldcg(sums_at(first + n));
#pragma unroll
      for (int n = first; n < first + kAtOnce; ++n) {
        const float4& sums = before[n - first];
        take(n, make_float4(added(o[4 * n], sums.x, 0), added(o[4 * n + 1], sums.y, 0), added(o[4 * n + 2], sums.z, 1),
                            added(o[4 * n + 3], sums.w, 1)));
      }
    }
  }

  const DecodeParams& p_;
  const Work& work_;
};

}  // namespace flashmask::sm90
