// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/ptx/registers.cuh"
#include "backends/cuda/sm90/backward/params.h"
#include "backends/cuda/sm90/backward/traits.cuh"

namespace flashmask::sm90::bwd {

/// Stores a consumer warp's share of a work tile's dk and dv in fp32, in the kernels of split query heads: rows or, if
/// there are parts to be added up, the work tile's part. Plain stores from registers, so that no staging tile has to be
/// waited for.
template <typename Traits>
class FloatKeys {
 public:
  using Params = typename Traits::Params;

  /// slab: which 16 keys of the key tile the warp has.
  __device__ __forceinline__ FloatKeys(const Params& p, int32_t key_tile, int32_t group, int32_t batch, uint32_t slab)
      : p_(p), key_tile_(key_tile), group_(group), batch_(batch), slab_(static_cast<int>(ptx::opaque(slab))) {}

  /// The columns from number kFirst on.
  template <int kFirst = 0, int kValues>
  __device__ __forceinline__ void store_dk(const float (&dk)[kValues]) const {
    store<Traits::kQkDim, kFirst>(dk, p_.scale, p_.keys.rows.dk, p_.keys.rows.dk_columns, 0);
  }
  template <int kFirst = 0, int kValues>
  __device__ __forceinline__ void store_dv(const float (&dv)[kValues]) const {
    store<Traits::kVDim, kFirst>(dv, 1, p_.keys.rows.dv, p_.keys.rows.dv_columns, kDkFloats);
  }

 private:
  static constexpr int kDkFloats = KeyFragments<Traits::kKeys, Traits::kQkDim>::kTileFloats,
                       kDvFloats = KeyFragments<Traits::kKeys, Traits::kVDim>::kTileFloats;

  /// before: floats of the part that lie before this gradient's.
  template <int kDim, int kFirst, int kValues>
  __device__ __forceinline__ void store(const float (&gradients)[kValues], float factor, const Rows& to,
                                        const Columns& columns, int before) const {
    if (p_.key_parts) {
      float* part = p_.key_parts + work_tile() * (kDkFloats + kDvFloats) + before;
      store_part(gradients, part + slab_ * KeyFragments<Traits::kKeys, kDim>::kSlabFloats + 16 * kFirst);
    } else {
      store_rows<kFirst>(gradients, factor, to, columns);
    }
  }

  template <int kValues>
  __device__ __forceinline__ static void store_part(const float (&gradients)[kValues], float* to) {
    auto* own = reinterpret_cast<float4*>(to) + reload_lane<Traits>();
#pragma unroll
    for (int e = 0; e < kValues / 4; ++e) {
      const float* four = gradients + 4 * e;
      own[e * 32] = {four[0], four[1], four[2], four[3]};
    }
  }

  /// A quad stores 32 bytes of a row at a time, a whole sector. Zeros become positive, as in sums.
  template <int kFirst, int kValues>
  __device__ __forceinline__ void store_rows(const float (&gradients)[kValues], float factor, const Rows& to,
                                             const Columns& columns) const {
    const auto lane = static_cast<int32_t>(reload_lane<Traits>());
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = key_tile_ * Traits::kKeys + 16 * slab_ + 8 * half + lane / 4;
      if (row >= p_.seqlen_k) continue;
      float* const own = to.template at<float>(batch_, row, group_) + 2 * (lane % 4);
#pragma unroll
      for (int e = 0; e < kValues / 4; ++e) {
        const float* pair = gradients + 4 * e + 2 * half;
        // Blocks that TMA fills one by one leave no gaps between columns.
        const int32_t column = Traits::kOneCopy ? columns.of_tile(kFirst + 8 * e) : kFirst + 8 * e;
        if (column < columns.count)
          *reinterpret_cast<float2*>(own + column) = {__fmaf_rn(pair[0], factor, 0.f), __fmaf_rn(pair[1], factor, 0.f)};
      }
    }
  }

  /// Its number among all, see BackwardParams::key_parts.
  __device__ __forceinline__ int64_t work_tile() const {
    return (static_cast<int64_t>(batch_) * p_.head_groups + group_) * p_.schedule.tiles + key_tile_;
  }

  const Params& p_;
  const int32_t key_tile_, group_, batch_;
  const int slab_;
};

}  // namespace flashmask::sm90::bwd
