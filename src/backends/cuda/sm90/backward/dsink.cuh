// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/device/sink_gradient.cuh"
#include "backends/cuda/sm90/backward/instance.h"
#include "backends/cuda/sm90/backward/row_bias.cuh"
#include "backends/cuda/sm90/backward/row_params.h"

namespace flashmask::sm90::bwd {

/// A block computes the gradient of a query head's sink.
template <typename Element>
__device__ __forceinline__ void sum_sink_gradient(const SinkGradientParams& p) {
  cudaGridDependencySynchronize();
  const uint32_t head = blockIdx.x;
  cuda::sum_sink_gradient<Element>(
      p, head, [&](int64_t batch, int32_t row) { return *p.lse.template at<float>(batch, row, head); },
      [&](int64_t batch) {
        const RowBias* biases = p.biases + (batch * p.heads + head) * p.rows_of_head;
        return [&p, biases](int32_t row) {
          return p.are_terms ? term_of<Bias::kGradient>(biases[row]) : gradient_bias(biases[row]);
        };
      });
}

}  // namespace flashmask::sm90::bwd
