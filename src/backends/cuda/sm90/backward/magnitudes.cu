// SPDX-License-Identifier: Apache-2.0
// The kernels that measure the keys in deterministic mode, one for each element type. Names as in instance.cu.in.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "backends/cuda/fragments/fixed_point.cuh"
#include "backends/cuda/sm90/backward/instance.h"

namespace flashmask::sm90::bwd {
namespace {

/// The next kernel may start beside the last of these blocks; it waits for all of them itself.
template <typename Element>
__device__ __forceinline__ void measure(const cuda::KeyMagnitudeParams& p) {
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  cuda::measure_keys<Element>(p);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kRowThreads)
    flashmask_sm90_bwd_bf16_magnitudes(const __grid_constant__ cuda::KeyMagnitudeParams p) {
  measure<__nv_bfloat16>(p);
}

extern "C" __global__ void __launch_bounds__(kRowThreads)
    flashmask_sm90_bwd_f16_magnitudes(const __grid_constant__ cuda::KeyMagnitudeParams p) {
  measure<__half>(p);
}

MagnitudeInstance magnitude_instance(DataType dtype) {
  if (dtype == DataType::kBFloat16)
    return {"sm90.bwd.bf16.magnitudes", reinterpret_cast<const void*>(flashmask_sm90_bwd_bf16_magnitudes)};
  return {"sm90.bwd.f16.magnitudes", reinterpret_cast<const void*>(flashmask_sm90_bwd_f16_magnitudes)};
}

}  // namespace flashmask::sm90::bwd
