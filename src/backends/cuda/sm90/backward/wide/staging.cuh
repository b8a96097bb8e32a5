// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/device/delay.cuh"
#include "backends/cuda/ptx/barrier.cuh"
#include "backends/cuda/ptx/reduction.cuh"
#include "backends/cuda/ptx/registers.cuh"
#include "backends/cuda/ptx/tma.cuh"
#include "backends/cuda/sm90/backward/columns/fixed_dq.cuh"
#include "backends/cuda/sm90/backward/columns/staging_tile.cuh"
#include "backends/cuda/sm90/backward/params.h"
#include "backends/cuda/sm90/backward/wide/traits.cuh"

namespace flashmask::sm90::bwd {

/// Stores of a wide kernel's consumer warp to global memory: dk and dv through the warp's own slab of its staging tile;
/// dq through the slab and the store warp, or from registers.
template <typename Traits>
class WideStaging {
 public:
  using Shared = SharedStorage<Traits>;
  using Element = typename Traits::Element;
  using Params = typename Traits::Params;

  __device__ __forceinline__ WideStaging(const Params& p, Shared& shared, uint32_t warpgroup)
      : p_(p), shared_(shared), warpgroup_(warpgroup), warp_(ptx::uniform(threadIdx.x / 32 % 4)) {}

  /// Waits until this warp's stores are in memory.
  __device__ __forceinline__ static void wait_stored() {
    if (ptx::is_leader()) ptx::bulk_wait();
  }

  /// Hands a block of dq to the store warp.
  __device__ __forceinline__ void store_dq(cuda::Accumulators<64, 64>& dq, uint32_t stage, uint32_t phase) const
    requires(!Traits::kDqFromRegisters)
  {
    if (sums_integers<Traits>(p_)) make_integers(dq, stage);
    wait(phase);
    SlabTile::template write_fragments<8>(dq, slab());
    ptx::arrive_once(shared_.dq.full[warpgroup_]);
  }

  /// Adds `dq` to the sums of query tile `index`: kCount values of the thread from number kBegin on, of blocks of 64
  /// columns from number `first` on, or of column `column` of that block.
  template <int kBegin, int kCount>
  __device__ __forceinline__ void add_dq(const float* dq, int first, uint32_t index, uint32_t column = 0) const
    requires Traits::kDqFromRegisters
  {
    static_assert(Blocks::kBlockColumns == 64 && Blocks::kRowBlocks == 1);
    float* to = sums_of(first, index) + column * (Blocks::kWarpFloats / 64) + 4 * ptx::lane();
#pragma unroll
    for (int i = kBegin; i < kBegin + kCount; i += 4) ptx::add_four(to + place_of(i), dq + (i - kBegin));
  }

  /// Replaces values of the stage's dq by their integers, in deterministic mode.
  template <int kValues>
  __device__ __forceinline__ void make_integers(float (&dq)[kValues], uint32_t stage) const {
    const int first = static_cast<int>(warp_) * 16;
    if constexpr (Traits::kPair) {
      make_integers_on_two_pipes<Traits>(p_, shared_, stage, first, dq);
    } else {
      bwd::make_integers<Traits>(p_, shared_, stage, first, dq);
    }
  }
  /// add_dq of integers: two at a time, a warp's side by side.
  template <int kBegin, int kCount>
  __device__ __forceinline__ void add_integers(const float* dq, int first, uint32_t index, uint32_t column = 0) const
    requires Traits::kDqFromRegisters
  {
    float* to = sums_of(first, index) + column * (Blocks::kWarpFloats / 64) + 2 * ptx::reload_lane();
#pragma unroll
    for (int i = kBegin; i < kBegin + kCount; i += 2) ptx::add_two_integers(to + place_of(i), dq + (i - kBegin));
  }

  /// Stores the warp's 16 keys of dk or dv, times `factor`.
  template <int kValues>
  __device__ __forceinline__ void store_keys(const CUtensorMap& map, const float (&gradients)[kValues], float factor,
                                             const ptx::BoxOrigin& at, uint32_t phase) const {
    wait(phase);
    store_slab(map, gradients, factor, at, slab());
  }

  /// Stores the warp's 16 keys of dv and dk, the columns of Dv and Dk, through V and K, which both consumers have read,
  /// and waits until they have left. `at` says where, but for the columns.
  template <typename Dk, typename Dv, int kDkValues, int kDvValues>
  __device__ __forceinline__ void store_through_operands(const float (&dk)[kDkValues], const float (&dv)[kDvValues],
                                                         const ptx::BoxOrigin& at) const
    requires Traits::kPair
  {
    ptx::BoxOrigin to = at;
    to.block = Dv::kBegin;
    store_slab(p_.keys.maps.dv, dv, 1, to, reinterpret_cast<float*>(shared_.v + place_in_operand<Dv>()));
    to.block = Dk::kBegin;
    store_slab(p_.keys.maps.dk, dk, p_.scale, to, reinterpret_cast<float*>(shared_.k + place_in_operand<Dk>()));
    if (ptx::is_leader()) ptx::bulk_wait_read();
  }

 private:
  using SlabTile = bwd::SlabTile<Element>;
  using Blocks = DqBlocks<Traits>;

  template <int kValues>
  __device__ __forceinline__ void store_slab(const CUtensorMap& map, const float (&gradients)[kValues], float factor,
                                             const ptx::BoxOrigin& at, float* slab) const {
    SlabTile::write_rows(gradients, factor, slab);
    SlabTile::template store<false, 2 * kValues>(map, at, p_.seqlen_k, slab);
  }

  /// The place in K or V of the warp's 16 keys of the columns of Share: each consumer's columns follow each other, and
  /// in them its warps.
  template <typename Share>
  __device__ __forceinline__ int place_in_operand() const {
    return static_cast<int>(Share::kBegin * 4 + warp_ * Share::kCount) * 16 * 64;
  }

  /// The warp's sums of a query tile in blocks of 64 columns from number `first` on; place_of(i) is the offset of a
  /// thread's value number `i`.
  __device__ __forceinline__ float* sums_of(int first, uint32_t index) const {
    return p_.dq_sums.sums + static_cast<int64_t>(index) * Blocks::kTileFloats +
           (first * 4 + static_cast<int>(warp_)) * Blocks::kWarpFloats;
  }
  __device__ __forceinline__ static constexpr int place_of(int i) {
    return i / 32 * (4 * Blocks::kWarpFloats) + i % 32 * 32;
  }

  __device__ __forceinline__ float* slab() const {
    return shared_.staging.tile[warpgroup_] + static_cast<int>(warp_) * Traits::kStagingFloats;
  }
  /// Waits until the slab may be overwritten: this warp's own stores have left it, and dq as of `phase`.
  __device__ __forceinline__ void wait([[maybe_unused]] uint32_t phase) const {
    if (ptx::is_leader()) ptx::bulk_wait_read();
    if constexpr (!Traits::kDqFromRegisters) {
      delay<Role::kConsumer>();
      ptx::wait(shared_.dq.empty[warpgroup_], phase);
    }
    __syncwarp();
  }

  const Params& p_;
  Shared& shared_;
  const uint32_t warpgroup_;
  const uint32_t warp_;  ///< in the warpgroup
};

}  // namespace flashmask::sm90::bwd
