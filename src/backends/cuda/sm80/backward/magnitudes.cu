// SPDX-License-Identifier: Apache-2.0
// The kernels that measure keys for sums in fixed point, one for each element type. Names as in instance.cu.in.
#include "backends/cuda/fragments/fixed_point.cuh"
#include "backends/cuda/sm80/backward/instance.h"

namespace flashmask::sm80::bwd {

extern "C" __global__ void __launch_bounds__(cuda::kRowThreads)
    flashmask_sm80_bwd_bf16_magnitudes(const __grid_constant__ cuda::KeyMagnitudeParams p) {
  cuda::measure_keys<__nv_bfloat16>(p);
}

extern "C" __global__ void __launch_bounds__(cuda::kRowThreads)
    flashmask_sm80_bwd_f16_magnitudes(const __grid_constant__ cuda::KeyMagnitudeParams p) {
  cuda::measure_keys<__half>(p);
}

MagnitudeInstance magnitude_instance(DataType dtype) {
  if (dtype == DataType::kBFloat16) return {"sm80.bwd.bf16.magnitudes", flashmask_sm80_bwd_bf16_magnitudes};
  return {"sm80.bwd.f16.magnitudes", flashmask_sm80_bwd_f16_magnitudes};
}

}  // namespace flashmask::sm80::bwd
