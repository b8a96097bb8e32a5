// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/sm90/backward/params.h"

namespace flashmask::sm90::grad {

/// Something that has a place for every (batch entry, row, head). Strides in elements.
struct Rows {
  void* data;  ///< null: absent
  int64_t batch_stride, row_stride, head_stride;

#if defined(__CUDACC__)
  template <typename T>
  __device__ __forceinline__ T* at(int64_t batch, int64_t row, int64_t head) const {
    return static_cast<T*>(data) + batch * batch_stride + row * row_stride + head * head_stride;
  }
#endif
};

struct RowParams {
  Rows out, dout, lse, dlse, dq;
  RowVectors rows;
  RowGradients sums;
  uint32_t* next;  ///< Schedule::next
  int32_t seqlen_q;
  uint32_t row_tiles, heads;
  float scale;
};

}  // namespace flashmask::sm90::grad
