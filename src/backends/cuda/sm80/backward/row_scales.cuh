// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/fragments/fixed_point.cuh"
#include "backends/cuda/fragments/fragments.cuh"
#include "backends/cuda/sm80/backward/params.h"

namespace flashmask::sm80::bwd {

/// The scales of the rows in a lane's fragments of a row tile's dq, two per slab. A scale is a power of two or 0, so
/// its lowest bit is free: it marks a row with a part that was not finite, as no integer says so.
template <typename Traits>
class RowScales {
 public:
  __device__ __forceinline__ RowScales(const DqSums& sums, int64_t tile, int warp)
      : first_(sums.scales + tile * Traits::kRows + 16 * Grid(warp).row + cuda::Slab::row_in_eight()) {}

  /// The factors of parts. A marked row's factor may have the mark, as no part of the row is read.
  __device__ __forceinline__ float2 of_slab(int slab) const { return {*row(slab, 0), *row(slab, 8)}; }
  /// Marks the lane's row number 0 or 1 of a slab.
  __device__ __forceinline__ void mark(int slab, int number) const {
    atomicOr(reinterpret_cast<unsigned*>(row(slab, 8 * number)), kNotFinite);
  }
  /// Makes floats of a slab's sums, NaN of marked rows.
  template <int kValues>
  __device__ __forceinline__ void make_floats(int slab, float (&sums)[kValues]) const {
    const float2 scales = of_slab(slab);
#pragma unroll
    for (int n = 0; n < kValues; ++n) {
      const float scale = n / 2 % 2 ? scales.y : scales.x;
      sums[n] = __float_as_uint(scale) & kNotFinite ? NAN : cuda::from_fixed_point(sums[n], scale);
    }
  }

 private:
  using Grid = typename Traits::DqGrid;
  static constexpr uint32_t kNotFinite = 1;

  __device__ __forceinline__ float* row(int slab, int row) const { return first_ + 16 * Grid::kRowWarps * slab + row; }

  float* first_;
};

}  // namespace flashmask::sm80::bwd
