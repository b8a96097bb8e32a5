// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/sm90/backward/roles.cuh"
#include "backends/cuda/sm90/backward/rows.cuh"
#include "gpu/policies/head_factor.cuh"
#include "gpu/policies/kernels.h"

namespace flashmask {
namespace sm90::grad {

using HeadFactorTraits = BackwardTraits<__nv_bfloat16, 64, 64, 2, /*kSplit_=*/false,
                                        BackwardPolicies<test::HeadFactorBackwardParams, test::HeadFactor>>;

extern "C" __global__ void __launch_bounds__(kRowThreads, 4)
    flashmask_test_preprocess(const __grid_constant__ RowParams p) {
  preprocess<HeadFactorTraits>(p);
}

#define FLASHMASK_ENTRY flashmask_test_head_factor_backward
#define FLASHMASK_TRAITS HeadFactorTraits
#include "backends/cuda/sm90/backward/kernel.inl"

extern "C" __global__ void __launch_bounds__(kRowThreads)
    flashmask_test_convert_dq(const __grid_constant__ RowParams p) {
  convert_dq<HeadFactorTraits>(p);
}

}  // namespace sm90::grad

namespace test {

BackwardKernels head_factor_backward_kernels() {
  using Traits = sm90::grad::HeadFactorTraits;
  const auto address = [](auto* kernel) { return reinterpret_cast<const void*>(kernel); };
  return {.preprocess = address(sm90::grad::flashmask_test_preprocess),
          .kernel = {address(sm90::grad::flashmask_test_head_factor_backward), Traits::kThreads,
                     static_cast<int>(sizeof(sm90::grad::SharedStorage<Traits>)), Traits::kRows, Traits::kKeys},
          .convert_dq = address(sm90::grad::flashmask_test_convert_dq),
          .row_threads = sm90::grad::kRowThreads};
}

}  // namespace test
}  // namespace flashmask
