// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace flashmask::sm90 {

/// The columns of a tensor's rows, which may be fewer than a kernel's tile has: each block of 64 of the tile's columns
/// begins with `width` of the tensor's.
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
