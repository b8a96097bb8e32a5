// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/device/delay.cuh"
#include "backends/cuda/sm90/forward/epilogue.cuh"

namespace flashmask::sm90 {

/// Epilogue of a call whose out is one part of a merge: rows in fp32, of a sink too. A quad has 32 bytes of a row at a
/// time, whole sectors, which it stores from registers.
struct PartialRows {
  template <typename Traits>
  __device__ __forceinline__ static void store(const typename Traits::Params& p, SharedStorage<Traits>&,
                                               const ptx::RingPosition<Traits::kQBuffers>&, int, const WorkTile& work,
                                               int32_t row, typename Traits::Outputs& o, cuda::RowState& rows) {
    const float sink = p.features.sink.template of_head<typename Traits::Element>(work.head);
    float lse[2];
    rows.finish(o, sink, /*weight_scale=*/1, p.scale_log2, lse);
    store_lse(p, row, work, [&](int half) { return lse[half]; });
    delay<Role::kStore>();
    const TensorRows& out = p.out_rows;
    // Opaque, so that nothing derived from it stays in registers while products are under way.
    const uint32_t lane = ptx::opaque(ptx::lane());
    float* const origin = static_cast<float*>(out.data) + work.batch * out.batch_stride + work.head * out.head_stride +
                          2 * static_cast<int32_t>(lane % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t own = row + static_cast<int32_t>(lane / 4) + 8 * half;
      if (own >= p.seqlen_q) continue;
      float* const to = origin + own * out.row_stride;
#pragma unroll
      for (int j = 0; j < Traits::kVDim / 8; ++j) {
        const int32_t column = p.out_columns.of_tile(8 * j);
        if (column < p.out_columns.count)
          *reinterpret_cast<float2*>(to + column) = {o[4 * j + 2 * half], o[4 * j + 2 * half + 1]};
      }
    }
  }
};

}  // namespace flashmask::sm90
