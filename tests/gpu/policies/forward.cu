// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/sm90/forward/roles.cuh"
#include "gpu/policies/head_factor.cuh"
#include "gpu/policies/kernels.h"

namespace flashmask {
namespace test {
namespace {

/// Stores from registers: O's layout in memory needs no help of the copy engine.
struct PartialRows {
  template <typename Traits>
  __device__ __forceinline__ static void store(const PartialRowsParams& p, sm90::SharedStorage<Traits>&,
                                               const ptx::RingPosition<2>&, int, const sm90::WorkTile& work,
                                               int32_t row, typename Traits::Outputs& o, cuda::RowState& rows) {
    rows.finish(o);
    sm90::store_lse(p, row, work, [&](int half) { return rows.lse(half, p.scale_log2); });
    const int64_t first = (static_cast<int64_t>(work.batch) * p.heads_q + work.head) * p.seqlen_q;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t own = row + cuda::Slab::row_in_eight() + 8 * half;
      if (own >= p.seqlen_q) continue;
      float* to = p.partial + (first + own) * Traits::kVDim + 2 * cuda::Slab::column_pair();
#pragma unroll
      for (int j = 0; j < Traits::kVDim / 8; ++j)
        *reinterpret_cast<float2*>(to + 8 * j) = {o[4 * j + 2 * half], o[4 * j + 2 * half + 1]};
    }
  }
};

template <typename Params, typename Score, typename Epilogue>
using Traits =
    sm90::ForwardTraits<__nv_bfloat16, 64, 64, 2, sm90::ForwardPolicies<Params, Score, cuda::AllWeights, Epilogue>>;
using PartialRowsTraits = Traits<PartialRowsParams, cuda::ProductScore, PartialRows>;
using HeadFactorTraits = Traits<HeadFactorParams, HeadFactor, sm90::FinalRows>;

}  // namespace
}  // namespace test

namespace sm90 {

#define FLASHMASK_ENTRY flashmask_test_partial_rows
#define FLASHMASK_TRAITS test::PartialRowsTraits
#include "backends/cuda/sm90/forward/kernel.inl"

#define FLASHMASK_ENTRY flashmask_test_head_factor
#define FLASHMASK_TRAITS test::HeadFactorTraits
#include "backends/cuda/sm90/forward/kernel.inl"

}  // namespace sm90

namespace test {
namespace {

template <typename Traits>
Kernel kernel_of(void (*entry)(typename Traits::Params)) {
  return {reinterpret_cast<const void*>(entry), Traits::kThreads, static_cast<int>(sizeof(sm90::SharedStorage<Traits>)),
          Traits::kRows, Traits::kKeys};
}

}  // namespace

Kernel partial_rows_kernel() { return kernel_of<PartialRowsTraits>(sm90::flashmask_test_partial_rows); }
Kernel head_factor_kernel() { return kernel_of<HeadFactorTraits>(sm90::flashmask_test_head_factor); }

}  // namespace test
}  // namespace flashmask
