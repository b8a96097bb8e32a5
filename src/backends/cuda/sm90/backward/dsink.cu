// SPDX-License-Identifier: Apache-2.0
// The kernels of a sink's gradient, one for each element type. Names as in instance.cu.in.
#include "backends/cuda/sm90/backward/dsink.cuh"

namespace flashmask::sm90::bwd {

extern "C" __global__ void __launch_bounds__(kRowThreads)
    flashmask_sm90_bwd_bf16_dsink(const __grid_constant__ SinkGradientParams p) {
  sum_sink_gradient<__nv_bfloat16>(p);
}

extern "C" __global__ void __launch_bounds__(kRowThreads)
    flashmask_sm90_bwd_f16_dsink(const __grid_constant__ SinkGradientParams p) {
  sum_sink_gradient<__half>(p);
}

SinkInstance sink_instance(DataType dtype) {
  if (dtype == DataType::kBFloat16)
    return {"sm90.bwd.bf16.dsink", reinterpret_cast<const void*>(flashmask_sm90_bwd_bf16_dsink)};
  return {"sm90.bwd.f16.dsink", reinterpret_cast<const void*>(flashmask_sm90_bwd_f16_dsink)};
}

}  // namespace flashmask::sm90::bwd
