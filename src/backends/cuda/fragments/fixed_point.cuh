// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/device/fixed_point_params.h"
#include "backends/cuda/device/row_products.cuh"
#include "backends/cuda/device/row_threads.h"
#include "backends/cuda/ptx/nearest_integer.cuh"

namespace flashmask::cuda {

/// The largest of a block's values, in all threads. Collective over the block; may be called repeatedly.
__device__ __forceinline__ float block_max(float value) {
  __shared__ __align__(16) float of_warp[kRowThreads / 32];  // read in whole words of 16 bytes
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    value = fmaxf(value, __shfl_xor_sync(0xffffffff, value, distance));
  __syncthreads();
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  for (const float other : of_warp) value = fmaxf(value, other);
  return value;
}

/// The largest of a vector's finite values, and the sum of all squares.
struct Magnitude {
  float most = 0, squares = 0;

  template <typename Element>
  __device__ __forceinline__ void add(const Eight<Element>& eight) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float value = fabsf(static_cast<float>(eight.values()[i]));
      most = fmaxf(most, value < INFINITY ? value : 0);
      squares = __fmaf_rn(value, value, squares);
    }
  }
  /// Joins the parts of `lanes` neighbours, a power of two, in all of them.
  __device__ __forceinline__ void join(int lanes) {
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
      squares += __shfl_xor_sync(0xffffffff, squares, distance);
      most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, distance));
    }
  }
  /// At least the norm of up to 256 values, even if their squares leave the range of floats.
  __device__ __forceinline__ float norm() const {
    constexpr float kRootOfColumns = 16, kLeast = 1e-30f;
    return kLeast < squares && squares < INFINITY ? sqrtf(squares) : kRootOfColumns * most;
  }
};

/// The largest |K_jd| and |V_j| of the block's keys before the visible extent's end. `lanes` neighbours, a power of two
/// up to 16, share a row.
template <typename Element>
__device__ __forceinline__ void measure_keys(const KeyMagnitudeParams& p) {
  constexpr int kMostLanes = 16;
  const uint32_t head = blockIdx.x % p.heads, block = blockIdx.x / p.heads % p.blocks,
                 batch = blockIdx.x / p.heads / p.blocks;
  const int32_t first = static_cast<int32_t>(block) * KeyMagnitudeParams::kKeys,
                end = min(p.extents.keys(batch, p.seqlen_k), first + KeyMagnitudeParams::kKeys);
  const int widest = max(p.k.columns, p.v.columns);
  int lanes = 1;
  while (lanes < kMostLanes && 8 * lanes < widest) lanes *= 2;
  const int lane = static_cast<int>(threadIdx.x) % lanes, rows_at_once = kRowThreads / lanes;
  const Element *k = p.k.of_head<Element>(batch, head), *v = p.v.of_head<Element>(batch, head);
  float most_k = 0, most_v = 0;
#pragma unroll 2
  for (int32_t base = first; base < end; base += rows_at_once) {
    const int32_t row = base + static_cast<int32_t>(threadIdx.x) / lanes;
    Magnitude of_k, of_v;
    for (int column = 8 * lane; column < widest; column += 8 * lanes) {
      if (row < end && column < p.k.columns) of_k.add(Eight<Element>::load(k + row * p.k.row_stride + column));
      if (row < end && column < p.v.columns) of_v.add(Eight<Element>::load(v + row * p.v.row_stride + column));
    }
    of_v.join(lanes);
    most_k = fmaxf(most_k, of_k.most);
    most_v = fmaxf(most_v, of_v.norm());
  }
  most_k = block_max(most_k);
  most_v = block_max(most_v);
  if (threadIdx.x == 0)
    p.magnitudes[(static_cast<int64_t>(batch) * p.heads + head) * p.blocks + block] = {most_k, most_v};
}

/// Magnitudes over all keys of a query head's key head. Collective over the block.
__device__ __forceinline__ KeyMagnitudes head_magnitudes(const RowScaleParams& p, int64_t batch, uint32_t head) {
  const KeyMagnitudes* of_head = p.magnitudes + (batch * p.heads + head / p.query_heads_per_key_head) * p.blocks;
  KeyMagnitudes most{};
  for (uint32_t block = threadIdx.x; block < p.blocks; block += kRowThreads) {
    const KeyMagnitudes of_block = of_head[block];
    most = {fmaxf(most.k, of_block.k), fmaxf(most.v, of_block.v)};
  }
  return {block_max(most.k), block_max(most.v)};
}

/// The power of two that the parts of a dq row are multiplied by. No sum of them exceeds `bound`, so none of their
/// integers exceeds 2^29, which leaves room for roundings. Whatever the bound is, inf and NaN too, the scale is one.
__device__ __forceinline__ float scale_for_bound(float bound) {
  constexpr int kBits = 29, kBias = 127, kMost = 2 * kBias - 1;  // the inverse of the largest is normal
  const int exponent = static_cast<int>(__float_as_uint(bound) >> 23 & 0xff) - kBias + 1;
  return __uint_as_float(static_cast<uint32_t>(min(kBits - exponent + kBias, kMost)) << 23);
}
/// The scale of a dq row; dout_norm is |dout|.
__device__ __forceinline__ float dq_row_scale(const RowScaleParams& p, const KeyMagnitudes& keys, float dout_norm,
                                              float delta) {
  constexpr float kLeast = 0x1p-126f;  // A product of less may be 0, and so no bound.
  return scale_for_bound(fmaxf(dout_norm * keys.v * p.kept_scale + fabsf(delta), kLeast) * keys.k);
}
__device__ __forceinline__ float inverse_scale(float scale) {
  return __uint_as_float((254u << 23) - __float_as_uint(scale));
}

__device__ __forceinline__ float from_fixed_point(float sum_bits, float scale) {
  return __int2float_rn(__float_as_int(sum_bits)) * inverse_scale(scale);
}

/// The bits of the two integers that ptx::add_two_integers has summed up in `joined`.
__device__ __forceinline__ float2 split_integers(uint64_t joined) {
  const auto first = static_cast<int32_t>(joined);
  const uint64_t second = (joined - static_cast<uint64_t>(first)) >> 32;
  return {__int_as_float(first), __uint_as_float(static_cast<uint32_t>(second))};
}

/// Multiplies a thread's parts of two rows, in fragments with two values of each in turn, by the rows' scales:
/// scale_of(row) of row 0 and 1. mark(row) is called if the row has NaN or infinite values, which integers cannot
/// represent. One row comes after the other, so that few registers are needed.
template <int kValues, typename ScaleOf, typename Mark>
__device__ __forceinline__ void scale_parts(const float (&dq)[kValues], float (&scaled)[kValues],
                                            const ScaleOf& scale_of, const Mark& mark) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const float scale = scale_of(row);
    float zero = 0;
#pragma unroll
    for (int i = 2 * row; i < kValues; i += 4) {
#pragma unroll
      for (int n = i; n < i + 2; ++n) {
        scaled[n] = dq[n] * scale;
        zero = __fmaf_rn(scaled[n], 0.f, zero);
      }
    }
    if (zero != 0) mark(row);
  }
}
/// Replaces the parts by the bits of the nearest integers.
template <int kValues>
__device__ __forceinline__ void round_parts(float (&scaled)[kValues]) {
#pragma unroll
  for (float& part : scaled) part = ptx::nearest_integer(part);
}
/// Scales and rounds a thread's parts in place.
template <int kValues, typename ScaleOf, typename Mark>
__device__ __forceinline__ void make_integers(float (&dq)[kValues], const ScaleOf& scale_of, const Mark& mark) {
  scale_parts(dq, dq, scale_of, mark);
  round_parts(dq);
}

/// Scales and rounds parts by multiply-adds, for kernels whose exponentials need all of the pipe that cvt shares with
/// them; |part * scale| <= 2^29. The low bits of x + 1.5 * 2^23 are the integer nearest to x, but only 23 of them: one
/// sum, `high`, takes x / -256, the other the remainder of x. The zero of `high` is such that the joint bits,
/// low - 256 high, are the integer's.
class PartRounder {
 public:
  __device__ __forceinline__ explicit PartRounder(float scale) : scale_(scale), high_scale_(scale / -kUnit) {}

  /// Returns the bits of the integer nearest to part * scale.
  __device__ __forceinline__ float round(float part) {
    constexpr float kLowZero = 0x1.8p23F, kHighZero = 0x800000 + 0x4b4000;
    const float high = __fmaf_rn(part, high_scale_, kHighZero),
                low = __fmaf_rn(part, scale_, __fmaf_rn(high, kUnit, kLowZero - kUnit * kHighZero));
    seen_ |= __float_as_uint(high);
    return __int_as_float(__float_as_int(low) - static_cast<int>(kUnit) * __float_as_int(high));
  }
  /// True if a part was NaN or infinite: `high` then has bits that no sum between 2^23 and 2^24 has, as finite parts'.
  __device__ __forceinline__ bool has_seen_non_finite() const {
    constexpr uint32_t kNonFinite = 0xff, kFinite = 127 + 23;  // exponents
    return seen_ & (kNonFinite & ~kFinite) << 23;
  }

 private:
  static constexpr float kUnit = 256;
  const float scale_, high_scale_;
  uint32_t seen_ = 0;  ///< bits of any `high`
};

/// make_integers of a quarter of the parts by cvt and of the others by multiply-adds, as each has a pipe of its own.
template <int kValues, typename ScaleOf, typename Mark>
__device__ __forceinline__ void make_integers_on_two_pipes(float (&dq)[kValues], const ScaleOf& scale_of,
                                                           const Mark& mark) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const float scale = scale_of(row);
    PartRounder rounder(scale);
    float zero = 0;
#pragma unroll
    for (int i = 2 * row; i < kValues; i += 4) {
      if (i % 8 < 4) {
        const float scaled = dq[i] * scale;
        zero = __fmaf_rn(scaled, 0.f, zero);
        dq[i] = ptx::nearest_integer(scaled);
      } else {
        dq[i] = rounder.round(dq[i]);
      }
      dq[i + 1] = rounder.round(dq[i + 1]);
    }
    if (zero != 0 || rounder.has_seen_non_finite()) mark(row);
  }
}
/// make_integers by multiply-adds.
template <int kValues, typename ScaleOf, typename Mark>
__device__ __forceinline__ void make_integers_by_adds(float (&dq)[kValues], const ScaleOf& scale_of, const Mark& mark) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    PartRounder rounder(scale_of(row));
#pragma unroll
    for (int i = 2 * row; i < kValues; i += 4) {
      dq[i] = rounder.round(dq[i]);
      dq[i + 1] = rounder.round(dq[i + 1]);
    }
    if (rounder.has_seen_non_finite()) mark(row);
  }
}

}  // namespace flashmask::cuda
