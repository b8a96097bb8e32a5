// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/attention/fragments.cuh"
#include "backends/cuda/attention/softmax.cuh"
#include "backends/cuda/common/delay.cuh"
#include "backends/cuda/ptx/barrier.cuh"
#include "backends/cuda/ptx/registers.cuh"
#include "backends/cuda/ptx/tensor_core.cuh"
#include "backends/cuda/ptx/tma.cuh"
#include "backends/cuda/sm90/forward/traits.cuh"

namespace flashmask::sm90 {

/// A consumer warp's first row in the tile.
__device__ __forceinline__ int slab_row() { return cuda::Slab::kRows * (static_cast<int>(threadIdx.x / 32) - 4); }

/// Stores the lse of a warp's 16 rows from slab_first_row on.
__device__ __forceinline__ void store_lse(const ForwardParams& p, int32_t slab_first_row, const WorkTile& work,
                                          const cuda::RowState& rows) {
  if (cuda::Slab::column_pair() != 0) return;
  const int64_t head = work.batch * p.lse_batch_stride + work.head * p.lse_head_stride;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t row = slab_first_row + cuda::Slab::row_in_eight() + 8 * half;
    if (row < p.seqlen_q) p.lse[head + row * p.lse_row_stride] = rows.lse(half, p.scale_log2);
  }
}

/// The policy Epilogue stores a work tile's results: of every consumer warp its 16 rows of O from `row` on, normalised,
/// and their lse. It may use the warp's own part of Q's buffer at `q_ring`, which is given back to the producer once
/// the bulk stores that the warp's leader has committed have read it. This one stores final rows, O in the tensors'
/// type.
struct FinalRows {
  template <typename Traits>
  __device__ __forceinline__ static void store(const typename Traits::Params& p, SharedStorage<Traits>& shared,
                                               const ptx::RingPosition<Traits::kQBuffers>& q_ring, int warpgroup,
                                               const WorkTile& work, int32_t row, const typename Traits::Outputs& o,
                                               const cuda::RowState& rows) {
    store_lse(p, row, work, rows);
    // Other warps of the warpgroup may still have products that read Q under way.
    ptx::named_barrier_sync(kWarpgroupBarrier + warpgroup, 128);
    write_rows<Traits>(ptx::shared_address(shared.q[q_ring.stage()]) + slab_row() * ptx::Swizzle128::kRow, o);
    delay<Role::kStore>();
    if (ptx::is_leader() && row < p.seqlen_q) {
      constexpr int kColumns = ptx::Swizzle128::kColumns;
      const typename Traits::Element* from = shared.q[q_ring.stage()] + slab_row() * kColumns;
#pragma unroll
      for (int block = 0; block < Traits::kVBlocks; ++block) {
        Traits::Blocks::store(p.out, from + block * Traits::kRows * kColumns, {row, block, work.head, work.batch});
      }
    }
    if (ptx::is_leader()) ptx::bulk_commit();
  }

 private:
  /// Puts the warp's rows at `slab` as TMA stores them.
  template <typename Traits>
  __device__ __forceinline__ static void write_rows(uint32_t slab, const typename Traits::Outputs& o) {
    using Element = typename Traits::Element;
    const uint32_t lane = threadIdx.x % 32, row = lane % 16;
#pragma unroll
    for (int step = 0; step < Traits::kVDim / 16; ++step) {
      const uint32_t block = step / 4, chunk = step % 4 * 2 + lane / 16;
      const uint32_t address = slab + block * ptx::Swizzle128::block(Traits::kRows) + row * ptx::Swizzle128::kRow +
                               ptx::Swizzle128::chunk(row, chunk);
      const float* of_step = o + 8 * step;
      ptx::stmatrix_x4(address, ptx::pack<Element>(of_step[0], of_step[1]), ptx::pack<Element>(of_step[2], of_step[3]),
                       ptx::pack<Element>(of_step[4], of_step[5]), ptx::pack<Element>(of_step[6], of_step[7]));
    }
    ptx::fence_async_proxy();
    __syncwarp();
  }
};

}  // namespace flashmask::sm90
