// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/device/row_products.cuh"
#include "backends/cuda/ptx/registers.cuh"

namespace flashmask::cuda {

/// The sum over a block's threads, in thread 0, always in one order. All threads call it.
__device__ __forceinline__ double block_sum(double value) {
  __shared__ double of_warp[kRowThreads / 32];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffff, value, distance);
  if (ptx::is_leader()) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  double sum = 0;
  for (const double part : of_warp) sum += part;
  return sum;
}

/// The gradient of a query head's sink z, which a block computes: -sum over batch entries and rows of
/// exp(z - lse) (dout . out - dlse). lse_of(batch, row) reads the one, minus_delta_of(batch)(row) the last factor,
/// negated. A row with lse = -inf adds nothing. Params: a kernel's, with sink, dsink, dsink_stride, batch and seqlen_q.
template <typename Element, typename Params, typename Lse, typename MinusDelta>
__device__ __forceinline__ void sum_sink_gradient(const Params& p, uint32_t head, const Lse& lse_of,
                                                  const MinusDelta& minus_delta_of) {
  const float sink = p.sink.template of_head<Element>(head);
  double sum = 0;
  for (int64_t batch = 0; batch < p.batch; ++batch) {
    const auto row_minus_delta = minus_delta_of(batch);
#pragma unroll 4
    for (int32_t row = static_cast<int32_t>(threadIdx.x); row < p.seqlen_q; row += kRowThreads) {
      const float lse = lse_of(batch, row);
      const float minus_delta = row_minus_delta(row);
      if (lse != -INFINITY) sum += static_cast<double>(expf(sink - lse)) * static_cast<double>(minus_delta);
    }
  }
  sum = block_sum(sum);
  if (threadIdx.x != 0) return;
  if (p.sink.is_float) {
    static_cast<float*>(p.dsink)[head * p.dsink_stride] = static_cast<float>(sum);
  } else {
    static_cast<Element*>(p.dsink)[head * p.dsink_stride] = static_cast<Element>(static_cast<float>(sum));
  }
}

}  // namespace flashmask::cuda
