// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/fragments/fixed_point.cuh"
#include "backends/cuda/sm90/backward/params.h"
#include "backends/cuda/sm90/backward/traits.cuh"

namespace flashmask::sm90::bwd {

/// A row's scale in deterministic mode, see RowBias.
__device__ __forceinline__ float scale_of(const RowBias& bias) {
  return __uint_as_float(bias.pair[RowBias::kScalePair] & 0xffff0000);
}

/// Marks a lane's row number `row`, 0 or 1, of query tile number `query_tile`, where its rows begin with `own`, as
/// having NaN or infinite values in dq.
template <typename Traits>
__device__ __forceinline__ void mark_row(const typename Traits::Params& p, uint32_t query_tile, int own, int row) {
  RowBias* biases = p.biases + static_cast<int64_t>(query_tile) * Traits::kRows + own;
  atomicOr(&biases[8 * row].pair[RowBias::kScalePair], RowBias::kNotFinite);
}

/// Scales a warp's part of the stage's dq, 16 rows from row `first` of its tile on, for cuda::round_parts to make
/// integers of it in deterministic mode.
template <typename Traits, int kValues>
__device__ __forceinline__ void scale_dq(const typename Traits::Params& p, const SharedStorage<Traits>& shared,
                                         uint32_t stage, int first, const float (&dq)[kValues],
                                         float (&scaled)[kValues]) {
  const int own = first + static_cast<int>(reload_lane<Traits>()) / 4;
  cuda::scale_parts(
      dq, scaled, [&](int row) { return scale_of(shared.biases[stage][own + 8 * row]); },
      [&](int row) { mark_row<Traits>(p, shared.tile[stage].query.index, own, row); });
}
/// Replaces a warp's part of the stage's dq by its integers.
template <typename Traits, int kValues>
__device__ __forceinline__ void make_integers(const typename Traits::Params& p, const SharedStorage<Traits>& shared,
                                              uint32_t stage, int first, float (&dq)[kValues]) {
  scale_dq<Traits>(p, shared, stage, first, dq, dq);
  cuda::round_parts(dq);
}

/// make_integers by multiply-adds.
template <typename Traits, int kValues>
__device__ __forceinline__ void make_integers_by_adds(const typename Traits::Params& p,
                                                      const SharedStorage<Traits>& shared, uint32_t stage, int first,
                                                      float (&dq)[kValues]) {
  const int own = first + static_cast<int>(reload_lane<Traits>()) / 4;
  cuda::make_integers_by_adds(
      dq, [&](int row) { return scale_of(shared.biases[stage][own + 8 * row]); },
      [&](int row) { mark_row<Traits>(p, shared.tile[stage].query.index, own, row); });
}
/// make_integers on two pipes.
template <typename Traits, int kValues>
__device__ __forceinline__ void make_integers_on_two_pipes(const typename Traits::Params& p,
                                                           const SharedStorage<Traits>& shared, uint32_t stage,
                                                           int first, float (&dq)[kValues]) {
  const int own = first + static_cast<int>(reload_lane<Traits>()) / 4;
  cuda::make_integers_on_two_pipes(
      dq, [&](int row) { return scale_of(shared.biases[stage][own + 8 * row]); },
      [&](int row) { mark_row<Traits>(p, shared.tile[stage].query.index, own, row); });
}

/// A lane's four sums of a fragment of 16 rows, whose biases begin at `biases`, as dq before scale.
__device__ __forceinline__ float4 from_integers(const float4& sums, const RowBias* biases) {
  const int row = static_cast<int>(threadIdx.x) % 32 / 4;
  const auto value = [](float sum, const RowBias& bias) {
    const bool marked = bias.pair[RowBias::kScalePair] & RowBias::kNotFinite;
    return marked ? NAN : cuda::from_fixed_point(sum, scale_of(bias));
  };
  const RowBias &first = biases[row], &second = biases[row + 8];
  return {value(sums.x, first), value(sums.y, first), value(sums.z, second), value(sums.w, second)};
}

}  // namespace flashmask::sm90::bwd
