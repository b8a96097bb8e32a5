// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/cache/merge.cuh"
#include "backends/cuda/ptx/tma.cuh"
#include "backends/cuda/sm90/decode/arrivals.cuh"
#include "backends/cuda/sm90/decode/factor_loader.cuh"
#include "backends/cuda/sm90/decode/row_access.cuh"
#include "backends/cuda/sm90/decode/row_state.cuh"

namespace flashmask::sm90 {

/// The query warp: copies the packed rows of a unit to where products read them, while the unit before is in use if
/// there are two buffers. Rows that are not there keep what an earlier unit left; columns that are not there are zeros.
/// Over a cache of e4m3 it then brings the unit's factors.
template <typename Traits>
class DecodeQueryLoader {
 public:
  using Shared = DecodeShared<Traits>;
  using Element = typename Traits::Element;
  __device__ __forceinline__ DecodeQueryLoader(const DecodeParams& p, Shared& shared)
      : p_(p), shared_(shared), factors_(p, shared) {}

  __device__ __forceinline__ void run() {
    while (true) {
      const uint32_t at = works_.stage();
      ptx::wait(shared_.work_full[at], works_.phase());
      const Work& work = shared_.works[at];
      if (work.tiles == Work::kEnd) return;
      ptx::wait(shared_.q_empty[queries_.stage()], queries_.phase() ^ 1);
      delay<Role::kProducer>();
      if (Traits::kBoxesQueries && p_.query_box_rows > 0 && (kFewRows == 0 || work.count() > kFewRows)) {
        load_box(work, shared_.q_full[queries_.stage()]);
      } else {
        load(work);
        arrive_after(cuda::RowCopy{p_.rows_aligned}, shared_.q_full[queries_.stage()]);
      }
      queries_.advance();
      factors_.load(work);
      arrive_warp(shared_.work_empty[at]);
      works_.advance();
    }
  }

 private:
  using Swizzle = ptx::Swizzle128;
  static constexpr int kRowChunks = Traits::kQkBlocks * 8;
  /// Packed rows up to which a warp copies them: a box of TMA has all that a tile can have.
  static constexpr int kFewRows = Traits::kFloat8 ? 0 : 8;

  /// Copies all rows that a tile can have: those past the unit's are other rows of q, or zeros, and are not stored.
  __device__ __forceinline__ void load_box(const Work& work, uint64_t& full) const {
    if (!ptx::is_leader()) {
      ptx::arrive(full);
    } else {
      const cuda::RowPlace place(p_, work, 0);
      const auto row = static_cast<int32_t>(place.row), batch = static_cast<int32_t>(place.batch),
                 head = static_cast<int32_t>(cuda::query_head(p_, work, 0));
      ptx::arrive_expect(full, static_cast<uint32_t>(p_.query_box_rows) * Traits::kQkBlocks * Swizzle::kRow);
#pragma unroll
      for (int block = 0; block < Traits::kQkBlocks; ++block)
        ptx::tma_load(shared_.q[queries_.stage()] + block * Traits::kRows * 64, p_.query_boxes, full,
                      {head, 0, row, batch}, 64 * block);
    }
    __syncwarp();
  }

  /// A lane's chunk of the packed rows, and its steps to the next one: quotients take longer than the copy.
  struct Chunk {
    int32_t packed, chunk, row, head;
    __device__ __forceinline__ explicit Chunk(int32_t heads)
        : packed(static_cast<int32_t>(ptx::lane()) / kRowChunks),
          chunk(static_cast<int32_t>(ptx::lane()) % kRowChunks),
          row(packed / heads),
          head(packed % heads) {}
    __device__ __forceinline__ void advance(int32_t heads) {
      int32_t rows = 32 / kRowChunks;
      if constexpr (32 % kRowChunks != 0) {
        chunk += 32 % kRowChunks;
        if (chunk >= kRowChunks) chunk -= kRowChunks, ++rows;
      }
      packed += rows;
      for (head += rows; head >= heads; head -= heads) ++row;
    }
  };

  __device__ __forceinline__ void load(const Work& work) {
    const int32_t heads = work.tile.head_count, count = work.count();
    const PackedLayout<Traits::kSpreadRows> layout(p_, count);
    auto* const base = reinterpret_cast<unsigned char*>(shared_.q[queries_.stage()]);
    const cuda::RowPlace place(p_, work, 0);
    const auto* const from = p_.q.at<const Element>(place.batch, place.row, cuda::query_head(p_, work, 0));
#pragma unroll 4
    for (Chunk at(heads); at.packed < count; at.advance(heads)) {
      if (8 * at.chunk >= p_.head_dim) continue;
      const auto row = static_cast<uint32_t>(layout.row(at.packed));
      auto* const to =
          base + at.chunk / 8 * Swizzle::block(Traits::kRows) + row * Swizzle::kRow + Swizzle::chunk(row, at.chunk % 8);
      const int64_t offset = at.row * p_.q.row_stride + at.head * p_.q.head_stride + 8 * at.chunk;
      cuda::RowCopy{p_.rows_aligned}.copy_chunk(to, from + offset, true);
    }
  }

  const DecodeParams& p_;
  Shared& shared_;
  ptx::RingPosition<Traits::kWorks> works_;
  ptx::RingPosition<Traits::kQueries> queries_;
  std::conditional_t<Traits::kFloat8, FactorLoader<Traits>, NoFactorLoader<Traits>> factors_;
};

}  // namespace flashmask::sm90
