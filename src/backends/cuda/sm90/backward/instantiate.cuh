// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/sm90/backward/instance.h"
#include "backends/cuda/sm90/backward/kernel.cuh"
#include "backends/cuda/sm90/backward/rows.cuh"

namespace flashmask::sm90::grad {

using bf16 = __nv_bfloat16;
using f16 = __half;

template <typename Element, int kHeadDim, int kConsumers>
BackwardInstance make_instance(DataType dtype) {
  using Traits = BackwardTraits<Element, kHeadDim, kConsumers>;
  return {dtype,
          Traits::kHeadDim,
          Traits::kRows,
          reinterpret_cast<const void*>(&prepare_rows<Traits>),
          reinterpret_cast<const void*>(&backward_kernel<Traits>),
          reinterpret_cast<const void*>(&backward_kernel<BackwardTraits<Element, kHeadDim, kConsumers, true>>),
          reinterpret_cast<const void*>(&finish_rows<Traits>),
          reinterpret_cast<const void*>(&finish_keys<Traits>),
          Traits::kThreads,
          static_cast<int>(sizeof(SharedStorage<Traits>))};
}

}  // namespace flashmask::sm90::grad

#define FLASHMASK_INSTANTIATE_BACKWARD(dtype, element, head_dim, consumers)                                        \
  flashmask::sm90::grad::BackwardInstance flashmask::sm90::grad::backward_##element##_##head_dim##_##consumers() { \
    return make_instance<element, head_dim, consumers>(flashmask::DataType::dtype);                                \
  }
