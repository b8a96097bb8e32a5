// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/ptx/registers.cuh"
#include "backends/cuda/sm90/backward/instance.h"
#include "backends/cuda/sm90/backward/row_bias.cuh"
#include "backends/cuda/sm90/backward/row_params.h"

namespace flashmask::sm90::bwd {

/// The sum over a block's threads, in thread 0, always in one order. All threads call it.
__device__ __forceinline__ double sum_of_block(double value) {
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
/// exp(z - lse) (dout . out - dlse), the last factor as preprocess left it. A row with lse = -inf adds nothing.
template <typename Element>
__device__ __forceinline__ void sum_sink_gradient(const SinkGradientParams& p) {
  cudaGridDependencySynchronize();
  const uint32_t head = blockIdx.x;
  const float sink = p.sink.template of_head<Element>(head);
  double sum = 0;
  for (int64_t batch = 0; batch < p.batch; ++batch) {
    const RowBias* biases = p.biases + (batch * p.heads + head) * p.rows_of_head;
#pragma unroll 4
    for (int32_t row = static_cast<int32_t>(threadIdx.x); row < p.seqlen_q; row += kRowThreads) {
      const float lse = *p.lse.template at<float>(batch, row, head);
      const float minus_delta = p.are_terms ? term_of<Bias::kGradient>(biases[row]) : gradient_bias(biases[row]);
      if (lse != -INFINITY) sum += static_cast<double>(expf(sink - lse)) * static_cast<double>(minus_delta);
    }
  }
  sum = sum_of_block(sum);
  if (threadIdx.x != 0) return;
  if (p.sink.is_float) {
    static_cast<float*>(p.dsink)[head * p.dsink_stride] = static_cast<float>(sum);
  } else {
    static_cast<Element*>(p.dsink)[head * p.dsink_stride] = static_cast<Element>(static_cast<float>(sum));
  }
}

}  // namespace flashmask::sm90::bwd
