// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/sm90/forward/instance.h"
#include "backends/cuda/sm90/forward/kernel.cuh"

namespace flashmask::sm90 {

using bf16 = __nv_bfloat16;
using f16 = __half;

template <typename Traits>
ForwardInstance make_instance(DataType dtype) {
  return {dtype,
          Traits::kHeadDim,
          Traits::kConsumers,
          reinterpret_cast<const void*>(&forward_kernel<Traits>),
          Traits::kThreads,
          static_cast<int>(sizeof(SharedStorage<Traits>))};
}

}  // namespace flashmask::sm90

#define FLASHMASK_INSTANTIATE_FORWARD(dtype, element, head_dim, consumers)                           \
  flashmask::sm90::ForwardInstance flashmask::sm90::forward_##element##_##head_dim##_##consumers() { \
    return make_instance<ForwardTraits<element, head_dim, consumers>>(flashmask::DataType::dtype);   \
  }
