// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace flashmask::sm90 {

/// The columns of a tensor's rows: a call may have fewer than the kernels' tiles. Of those, each block of 64 begins
/// with `width` of the tensor's.
struct Columns {
  int32_t count, width;

#if defined(__CUDACC__)
  /// Which of the tensor's columns a tile's column is, one after which seven more follow; `count` or more: none.
  __device__ __forceinline__ int32_t of_tile(int32_t column) const {
    return column % 64 < width ? column / 64 * width + column % 64 : count;
  }
#endif
};

}  // namespace flashmask::sm90
