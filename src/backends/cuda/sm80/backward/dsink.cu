// SPDX-License-Identifier: Apache-2.0
// The kernels of a sink's gradient, one for each element type. Names as in instance.cu.in.
#include "backends/cuda/device/sink_gradient.cuh"
#include "backends/cuda/sm80/backward/instance.h"

namespace flashmask::sm80::bwd {
namespace {

template <typename Element>
__device__ __forceinline__ void sum_sink_gradient(const SinkGradientParams& p) {
  const uint32_t head = blockIdx.x;
  cuda::sum_sink_gradient<Element>(
      p, head, [&](int64_t batch, int32_t row) { return p.lse.of_head<float>(batch, head)[row * p.lse.row_stride]; },
      [&](int64_t batch) {
        const RowTerms* terms = p.terms + (batch * p.heads + head) * p.rows_of_head;
        return [terms](int32_t row) { return terms[row].minus_delta; };
      });
}

}  // namespace

extern "C" __global__ void __launch_bounds__(cuda::kRowThreads)
    flashmask_sm80_bwd_bf16_dsink(const __grid_constant__ SinkGradientParams p) {
  sum_sink_gradient<__nv_bfloat16>(p);
}

extern "C" __global__ void __launch_bounds__(cuda::kRowThreads)
    flashmask_sm80_bwd_f16_dsink(const __grid_constant__ SinkGradientParams p) {
  sum_sink_gradient<__half>(p);
}

SinkInstance sink_instance(DataType dtype) {
  if (dtype == DataType::kBFloat16) return {"sm80.bwd.bf16.dsink", flashmask_sm80_bwd_bf16_dsink};
  return {"sm80.bwd.f16.dsink", flashmask_sm80_bwd_f16_dsink};
}

}  // namespace flashmask::sm80::bwd
