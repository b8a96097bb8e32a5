// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/sm90/backward/roles.cuh"
#include "backends/cuda/sm90/backward/rows.cuh"
#include "gpu/policies/head_factor.cuh"
#include "gpu/policies/kernels.h"

namespace flashmask {
namespace sm90::bwd {

template <typename Policies>
using Traits = BackwardTraits<__nv_bfloat16, 64, 64, 2, /*kSplit_=*/false, Policies>;
using HeadFactorTraits = Traits<BackwardPolicies<test::HeadFactorBackwardParams, test::HeadFactor>>;

extern "C" __global__ void __launch_bounds__(kRowThreads, 4)
    flashmask_test_head_factor_preprocess(const __grid_constant__ RowParams p) {
  preprocess<HeadFactorTraits>(p);
}

#define FLASHMASK_ENTRY flashmask_test_head_factor_backward
#define FLASHMASK_TRAITS HeadFactorTraits
#include "backends/cuda/sm90/backward/kernel.inl"

// Whatever the policies are, the rows are converted in one way.
extern "C" __global__ void __launch_bounds__(kRowThreads)
    flashmask_test_convert_dq(const __grid_constant__ RowParams p) {
  convert_dq<HeadFactorTraits>(p);
}

}  // namespace sm90::bwd

namespace test {
namespace {

template <typename Function>
const void* address(Function* kernel) {
  return reinterpret_cast<const void*>(kernel);
}

template <typename Traits>
BackwardKernel kernel_of(void (*preprocess)(sm90::bwd::RowParams), void (*entry)(typename Traits::Params)) {
  constexpr auto kSharedBytes = static_cast<int>(sizeof(sm90::bwd::SharedStorage<Traits>));
  return {{address(entry), Traits::kThreads, kSharedBytes, Traits::kRows, Traits::kKeys}, address(preprocess)};
}

}  // namespace

BackwardKernels backward_kernels() {
  using namespace sm90::bwd;
  return {.head_factor =
              kernel_of<HeadFactorTraits>(flashmask_test_head_factor_preprocess, flashmask_test_head_factor_backward),
          .convert_dq = address(flashmask_test_convert_dq),
          .row_threads = kRowThreads};
}

}  // namespace test
}  // namespace flashmask
