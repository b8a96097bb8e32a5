// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <type_traits>

#include "backends/cuda/device/delay.cuh"
#include "backends/cuda/ptx/barrier.cuh"
#include "backends/cuda/ptx/registers.cuh"
#include "backends/cuda/ptx/tensor_core.cuh"
#include "backends/cuda/ptx/tma.cuh"
#include "backends/cuda/sm90/backward/columns/fixed_dq.cuh"
#include "backends/cuda/sm90/backward/columns/float_keys.cuh"
#include "backends/cuda/sm90/backward/columns/staging_tile.cuh"
#include "backends/cuda/sm90/backward/params.h"
#include "backends/cuda/sm90/backward/traits.cuh"

namespace flashmask::sm90::bwd {

/// The staging tiles in shared memory that dq, dk and dv leave through, one for each consumer warp, as one of the warps
/// sees them. A warp's dk and dv keep to its own; the blocks of a whole dq take tiles of both warpgroups.
template <typename Traits>
class Staging {
 public:
  using Shared = SharedStorage<Traits>;
  using Element = typename Traits::Element;
  using Params = typename Traits::Params;
  using Blocks = DqBlocks<Traits>;
  using KeyGradients = typename Traits::KeyGradients;
  using ValueGradients = typename Traits::ValueGradients;
  /// Number of blocks of a tile's dq that the warpgroup computes, and a thread's registers for them.
  static constexpr int kOwnBlocks = Traits::kAlternate ? Blocks::kBlocks : Blocks::kBlocks / Traits::kConsumers;
  using Block = cuda::Accumulators<64, Blocks::kBlockColumns>;
  static_assert(Blocks::kTileFloats <= Traits::kConsumerWarps * Traits::kStagingFloats);
  using OwnDq = Block[kOwnBlocks];

  __device__ __forceinline__ Staging(const Params& p, Shared& shared, uint32_t warpgroup)
      : p_(p), shared_(shared), warpgroup_(warpgroup), warp_(ptx::uniform(threadIdx.x / 32 % 4)) {}

  /// Waits until the copy engine has read the tiles that this warp has stored from.
  __device__ __forceinline__ static void wait_store_read() {
    if (ptx::is_leader()) ptx::bulk_wait_read();
    __syncwarp();
  }
  /// Waits until this warp's stores are in memory.
  __device__ __forceinline__ static void wait_stored() {
    if (ptx::is_leader()) ptx::bulk_wait();
  }

  /// Waits until all staging tiles may be overwritten.
  __device__ __forceinline__ void wait(uint32_t phase) const {
    if (ptx::is_leader()) ptx::bulk_wait_read();
    delay<Role::kConsumer>();
    ptx::wait(shared_.dq_empty, phase);
    __syncwarp();
  }

  /// Stores a tile's dq, if no other tile contributes to it, or hands it to the store warp.
  __device__ __forceinline__ void store_dq(const OwnDq& dq, uint32_t flags, uint32_t stage, uint32_t phase) const {
    wait(phase);
    if (flags & Tile::kAlone) {
      store_dq_rows(dq, shared_.tile[stage].query);
    } else {
      hand_over(dq, stage);
    }
  }

  /// Hands dq of the stage to the store warp as integers.
  __device__ __forceinline__ void store_integers(OwnDq& dq, uint32_t stage, uint32_t phase) const {
    wait(phase);  // ptxas spills if that comes behind
#pragma unroll
    for (int block = 0; block < kOwnBlocks; ++block)
      make_integers_by_adds<Traits>(p_, shared_, stage, Blocks::row(warp_of(block)), dq[block]);
    hand_over(dq, stage);
  }

  /// dq that becomes integers once its stage has been released, with what multiply-adds need of the stage.
  struct UnscaledDq {
    OwnDq dq;
    float scales[kOwnBlocks][2];
    uint32_t query_tile;
  };
  /// dq between keep and store_kept: scaled, unless multiply-adds will do that, too.
  using KeptDq = std::conditional_t<Traits::kAlternate, UnscaledDq, OwnDq>;

  /// Keeps this warp's dq of the stage.
  __device__ __forceinline__ void keep(const OwnDq& dq, OwnDq& scaled, uint32_t stage) const {
#pragma unroll
    for (int block = 0; block < kOwnBlocks; ++block)
      bwd::scale_dq<Traits>(p_, shared_, stage, Blocks::row(warp_of(block)), dq[block], scaled[block]);
  }
  __device__ __forceinline__ void keep(const OwnDq& dq, UnscaledDq& kept, uint32_t stage) const {
#pragma unroll
    for (int block = 0; block < kOwnBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < Blocks::kBlockColumns / 2; ++i) kept.dq[block][i] = dq[block][i];
#pragma unroll
      for (int row = 0; row < 2; ++row)
        kept.scales[block][row] = scale_of(shared_.biases[stage][first_row(block) + 8 * row]);
    }
    kept.query_tile = shared_.tile[stage].query.index;
  }
  /// Hands kept dq to the store warp as integers.
  __device__ __forceinline__ void store_kept(OwnDq& scaled, uint32_t stage, uint32_t phase) const {
#pragma unroll
    for (auto& block : scaled) cuda::round_parts(block);
    wait(phase);
    hand_over(scaled, stage);
  }
  __device__ __forceinline__ void store_kept(UnscaledDq& kept, uint32_t stage, uint32_t phase) const {
#pragma unroll
    for (int block = 0; block < kOwnBlocks; ++block)
      cuda::make_integers_by_adds(
          kept.dq[block], [&](int row) { return kept.scales[block][row]; },
          [&](int row) { mark_row<Traits>(p_, kept.query_tile, first_row(block), row); });
    wait(phase);
    hand_over(kept.dq, stage);
  }

  /// Stores a work tile's dk and dv.
  __device__ __forceinline__ void store_dkv(const KeyGradients& dk, const ValueGradients& dv, int32_t key,
                                            int32_t group, int32_t batch, uint32_t phase) const {
    if constexpr (Traits::kSplit) {
      const FloatKeys<Traits> keys(p_, key / Traits::kKeys, group, batch, warpgroup_ * 4 + warp_);
      keys.store_dv(dv);
      keys.store_dk(dk);
    } else {
      const ptx::BoxOrigin at{key + static_cast<int32_t>(warpgroup_ * 64 + warp_ * 16), 0, group, batch};
      store_keys(p_.keys.maps.dv, dv, 1, at, phase);
      store_keys(p_.keys.maps.dk, dk, p_.scale, at, phase);
    }
  }

 private:
  using SlabTile = bwd::SlabTile<Element>;
  static constexpr int kDqFragments = Blocks::kBlockColumns / 8;

  __device__ __forceinline__ void hand_over(const OwnDq& dq, uint32_t stage) const {
#pragma unroll
    for (int block = 0; block < kOwnBlocks; ++block)
      SlabTile::template write_fragments<kDqFragments>(dq[block], tile_of(block));
    if constexpr (Traits::kAlternate) {
      ptx::arrive(shared_.dq_full[stage]);  // all lanes, as the other warpgroup writes there next
    } else {
      ptx::arrive_once(shared_.dq_full[stage]);
    }
  }

  __device__ __forceinline__ float* own_tile() const { return shared_.staging[warpgroup_ * 4 + warp_]; }
  /// The number of the warp's 16 rows of one of the warpgroup's blocks of dq, and the staging tile that they have.
  __device__ __forceinline__ int warp_of(int block) const {
    return (Traits::kAlternate ? block : warpgroup_ * kOwnBlocks + block) * 4 + static_cast<int>(warp_);
  }
  __device__ __forceinline__ float* tile_of(int block) const {
    return shared_.staging[0] + warp_of(block) * Blocks::kWarpFloats;
  }
  /// The first of the lane's two rows of a block.
  __device__ __forceinline__ int first_row(int block) const {
    return Blocks::row(warp_of(block)) + static_cast<int>(reload_lane<Traits>()) / 4;
  }

  __device__ __forceinline__ void store_dq_rows(const OwnDq& dq, const QueryTile& of_leader) const {
    const auto tile = QueryTile::from_leader(of_leader);
#pragma unroll
    for (int block = 0; block < kOwnBlocks; ++block) {
      const int n = warp_of(block);
      if constexpr (Blocks::kColumnBlocks > 1 && Blocks::kBlockColumns % 64 != 0) {
        store_overlapping(dq[block], tile, n, tile_of(block));
        continue;
      }
      SlabTile::write_rows(dq[block], p_.scale, tile_of(block));
      SlabTile::template store<Traits::kOneCopy, Blocks::kBlockColumns>(
          p_.dq,
          {tile.row_tile * Traits::kRows + Blocks::row(n), Blocks::column_block(n), static_cast<int32_t>(tile.head),
           static_cast<int32_t>(tile.batch)},
          p_.seqlen_q, tile_of(block));
    }
  }

  /// Warp number n's rows of a block between 64 and 128 columns, as two boxes of 64 that have some columns in common.
  __device__ __forceinline__ void store_overlapping(const Block& dq, const QueryTile& tile, int n, float* to) const {
    constexpr int kSecond = Blocks::kBlockColumns - 64;
    const ptx::BoxOrigin at{tile.row_tile * Traits::kRows + Blocks::row(n), 0, static_cast<int32_t>(tile.head),
                            static_cast<int32_t>(tile.batch)};
    const int column = Blocks::column_block(n) * Blocks::kBlockColumns;
    SlabTile::write_rows(cuda::part_of<0, 32>(dq), p_.scale, to, reload_lane<Traits>());
    SlabTile::write_rows(cuda::part_of<kSecond / 2, 32>(dq), p_.scale, to + 16 * 64 / 2, reload_lane<Traits>());
    delay<Role::kStore>();
    if (!ptx::is_leader()) return;
    if (at.row < p_.seqlen_q) {
      ptx::tma_store(p_.dq, to, at, column);
      ptx::tma_store(p_.dq, to + 16 * 64 / 2, at, column + kSecond);
    }
    ptx::bulk_commit();
  }

  /// 16 keys by each warp.
  template <int kValues>
  __device__ __forceinline__ void store_keys(const CUtensorMap& map, const float (&gradients)[kValues], float factor,
                                             const ptx::BoxOrigin& at, uint32_t phase) const {
    wait(phase);
    SlabTile::write_rows(gradients, factor, own_tile(), reload_lane<Traits>());
    SlabTile::template store<Traits::kOneCopy, 2 * kValues>(map, at, p_.seqlen_k, own_tile());
  }

  const Params& p_;
  Shared& shared_;
  const uint32_t warpgroup_;
  const uint32_t warp_;  ///< in the warpgroup
};

}  // namespace flashmask::sm90::bwd
