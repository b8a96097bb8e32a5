// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace flashmask::cuda {

/// The rows of a tensor [batch, seqlen, heads, columns] that kernels address themselves. Strides are in elements.
struct TensorRows {
  void* data;
  int64_t batch_stride, head_stride, row_stride;
  int32_t columns;

#if defined(__CUDACC__)
  /// Row 0 of (batch entry, head).
  template <typename Element>
  __device__ __forceinline__ Element* of_head(int64_t batch, int64_t head) const {
    return static_cast<Element*>(data) + batch * batch_stride + head * head_stride;
  }
#endif
};

}  // namespace flashmask::cuda
