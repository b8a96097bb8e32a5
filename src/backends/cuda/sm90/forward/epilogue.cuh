// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/device/delay.cuh"
#include "backends/cuda/fragments/fragments.cuh"
#include "backends/cuda/fragments/softmax.cuh"
#include "backends/cuda/ptx/barrier.cuh"
#include "backends/cuda/ptx/registers.cuh"
#include "backends/cuda/ptx/tensor_core.cuh"
#include "backends/cuda/ptx/tma.cuh"
#include "backends/cuda/sm90/forward/traits.cuh"

namespace flashmask::sm90 {

/// A consumer warp's first row in the tile.
__device__ __forceinline__ int slab_row() { return cuda::Slab::kRows * (static_cast<int>(threadIdx.x / 32) - 4); }

/// Stores the lse of a warp's 16 rows from slab_first_row on; lse(half) is that of rows g + 8 half.
template <typename Lse>
__device__ __forceinline__ void store_lse(const ForwardParams& p, int32_t slab_first_row, const WorkTile& work,
                                          const Lse& lse) {
  if (cuda::Slab::column_pair() != 0) return;
  const int64_t head = work.batch * p.lse_batch_stride + work.head * p.lse_head_stride;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t row = slab_first_row + cuda::Slab::row_in_eight() + 8 * half;
    if (row < p.seqlen_q) p.lse[head + row * p.lse_row_stride] = lse(half);
  }
}

/// The policy Epilogue normalises and stores a work tile's results: of every consumer warp its 16 rows of O from `row`
/// on, and their lse. Where Q has two buffers (kOutputThroughQ), it may use the warp's own part of the one at `q_ring`,
/// which is released once the bulk stores that the warp's leader has committed have read it; a single one has been
/// released before. This one stores final rows, O in the tensors' type.
struct FinalRows {
  template <typename Traits>
  __device__ __forceinline__ static void store(const typename Traits::Params& p, SharedStorage<Traits>& shared,
                                               const ptx::RingPosition<Traits::kQBuffers>& q_ring, int warpgroup,
                                               const WorkTile& work, int32_t row, typename Traits::Outputs& o,
                                               cuda::RowState& rows) {
    rows.finish(o);
    store_lse(p, row, work, [&](int half) { return rows.lse(half, p.scale_log2); });
    store_rows<Traits>(p, shared, q_ring, warpgroup, work, row, o);
  }

 protected:
  template <typename Traits>
  __device__ __forceinline__ static void store_rows(const typename Traits::Params& p, SharedStorage<Traits>& shared,
                                                    const ptx::RingPosition<Traits::kQBuffers>& q_ring, int warpgroup,
                                                    const WorkTile& work, int32_t row,
                                                    const typename Traits::Outputs& o) {
    if constexpr (Traits::kOutputThroughQ) {
      store_through_q<Traits>(p, shared, q_ring, warpgroup, work, row, o);
    } else {
      store_from_registers<Traits>(p, work, row, o);
    }
  }

 private:
  template <typename Traits>
  __device__ __forceinline__ static void store_through_q(const typename Traits::Params& p,
                                                         SharedStorage<Traits>& shared,
                                                         const ptx::RingPosition<Traits::kQBuffers>& q_ring,
                                                         int warpgroup, const WorkTile& work, int32_t row,
                                                         const typename Traits::Outputs& o) {
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

  /// A quad holds 16 bytes of a row at a time. Its lanes exchange four such chunks, so that each of them has one, and
  /// the quad stores 64 bytes of a row, whole sectors.
  template <typename Traits>
  __device__ __forceinline__ static void store_from_registers(const typename Traits::Params& p, const WorkTile& work,
                                                              int32_t row, const typename Traits::Outputs& o) {
    using Element = typename Traits::Element;
    constexpr int kChunk = 8, kColumns = 4 * kChunk;
    static_assert(Traits::kVDim % kColumns == 0);
    delay<Role::kStore>();
    const TensorRows& out = p.out_rows;
    // Opaque, so that nothing derived from it stays in registers while products are under way.
    const uint32_t lane = ptx::opaque(ptx::lane());
    const int32_t first_column = kChunk * static_cast<int32_t>(lane % 4);
    Element* const origin =
        static_cast<Element*>(out.data) + work.batch * out.batch_stride + work.head * out.head_stride + first_column;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t own = row + static_cast<int32_t>(lane / 4) + 8 * half;
      // Rows past the last store nothing.
      const int32_t columns = own < p.seqlen_q ? out.columns - first_column : 0;
      Element* const to = origin + own * out.row_stride;
#pragma unroll
      for (int column = 0; column < Traits::kVDim; column += kColumns) {
        uint32_t words[4];
#pragma unroll
        for (int chunk = 0; chunk < 4; ++chunk) {
          const float* pair = o + (column + kChunk * chunk) / 2 + 2 * half;
          words[chunk] = ptx::pack<Element>(pair[0], pair[1]);
        }
        cuda::transpose_in_quad(lane, words);
        if (column < columns) *reinterpret_cast<uint4*>(to + column) = {words[0], words[1], words[2], words[3]};
      }
    }
  }

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

/// The rows of a call's features: of the sink, and of dropout, whose scale they get.
struct FeaturedRows : FinalRows {
  template <typename Traits>
  __device__ __forceinline__ static void store(const typename Traits::Params& p, SharedStorage<Traits>& shared,
                                               const ptx::RingPosition<Traits::kQBuffers>& q_ring, int warpgroup,
                                               const WorkTile& work, int32_t row, typename Traits::Outputs& o,
                                               cuda::RowState& rows) {
    const float sink = p.features.sink.template of_head<typename Traits::Element>(work.head);
    float lse[2];
    rows.finish(o, sink, p.features.dropout.scale, p.scale_log2, lse);
    store_lse(p, row, work, [&](int half) { return lse[half]; });
    store_rows<Traits>(p, shared, q_ring, warpgroup, work, row, o);
  }
};

}  // namespace flashmask::sm90
