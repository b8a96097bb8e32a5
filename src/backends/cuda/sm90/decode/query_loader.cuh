// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/cache/merge.cuh"
#include "backends/cuda/sm90/decode/arrivals.cuh"
#include "backends/cuda/sm90/decode/row_access.cuh"
#include "backends/cuda/sm90/decode/row_state.cuh"

namespace flashmask::sm90 {

/// The query warp: copies the packed rows of a unit to where products read them, while the unit before is in use if
/// there are two buffers. Rows that are not there keep what an earlier unit left; columns that are not there are zeros.
template <typename Traits>
class DecodeQueryLoader {
 public:
  using Shared = DecodeShared<Traits>;
  using Element = typename Traits::Element;
  __device__ __forceinline__ DecodeQueryLoader(const DecodeParams& p, Shared& shared) : p_(p), shared_(shared) {}

  __device__ __forceinline__ void run() {
    while (true) {
      const uint32_t at = works_.stage();
      ptx::wait(shared_.work_full[at], works_.phase());
      const Work& work = shared_.works[at];
      if (work.tiles == Work::kEnd) return;
      ptx::wait(shared_.q_empty[queries_.stage()], queries_.phase() ^ 1);
      delay<Role::kProducer>();
      load(work);
      arrive_after(cuda::RowCopy{p_.rows_aligned}, shared_.q_full[queries_.stage()]);
      queries_.advance();
      arrive_warp(shared_.work_empty[at]);
      works_.advance();
    }
  }

 private:
  using Swizzle = ptx::Swizzle128;
  static constexpr int kRowChunks = Traits::kQkBlocks * 8;

  __device__ __forceinline__ void load(const Work& work) {
    const int32_t heads = work.tile.head_count, count = work.tile.row_count * heads;
    const PackedLayout layout(p_, count);
    auto* const base = reinterpret_cast<unsigned char*>(shared_.q[queries_.stage()]);
    for (int32_t n = static_cast<int32_t>(ptx::lane()); n < count * kRowChunks; n += 32) {
      const int32_t packed = n / kRowChunks, chunk = n % kRowChunks;
      if (8 * chunk >= p_.head_dim) continue;
      const cuda::RowPlace place(p_, work, packed / heads);
      const int64_t head = cuda::query_head(p_, work, packed % heads);
      const auto row = static_cast<uint32_t>(layout.row(packed));
      auto* const to =
          base + chunk / 8 * Swizzle::block(Traits::kRows) + row * Swizzle::kRow + Swizzle::chunk(row, chunk % 8);
      cuda::RowCopy{p_.rows_aligned}.copy_chunk(to, p_.q.at<const Element>(place.batch, place.row, head) + 8 * chunk,
                                                true);
    }
  }

  const DecodeParams& p_;
  Shared& shared_;
  ptx::RingPosition<Traits::kWorks> works_;
  ptx::RingPosition<Traits::kQueries> queries_;
};

}  // namespace flashmask::sm90
