// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/common/delay.cuh"
#include "backends/cuda/ptx/barrier.cuh"
#include "backends/cuda/ptx/registers.cuh"
#include "backends/cuda/ptx/tensor_core.cuh"
#include "backends/cuda/ptx/tma.cuh"
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
  using Blocks = DqBlocks<Traits::kRows, Traits::kQkDim>;
  using KeyGradients = typename Traits::KeyGradients;
  using ValueGradients = typename Traits::ValueGradients;
  /// How many 64 x 64 blocks of a tile's dq the warpgroup computes, and what a thread holds of them.
  static constexpr int kOwnBlocks = Traits::kAlternate ? Blocks::kBlocks : Blocks::kBlocks / Traits::kConsumers;
  using Block = cuda::Accumulators<64, 64>;
  using OwnDq = Block[kOwnBlocks];

  __device__ __forceinline__ Staging(const Params& p, Shared& shared, uint32_t warpgroup)
      : p_(p), shared_(shared), warpgroup_(warpgroup), warp_(ptx::uniform(threadIdx.x / 32 % 4)) {}

  /// Waits until the copy engine has read the tiles that this warp has stored from.
  __device__ __forceinline__ static void wait_store_read() {
    if (ptx::is_leader()) ptx::bulk_wait_read();
    __syncwarp();
  }
  /// Waits until what this warp has stored is in memory.
  __device__ __forceinline__ static void wait_stored() {
    if (ptx::is_leader()) ptx::bulk_wait();
  }

  /// Stores a tile's dq, if no other tile contributes to it, or hands it to the store warp.
  __device__ __forceinline__ void store_dq(const OwnDq& dq, uint32_t flags, uint32_t stage, uint32_t phase) const {
    wait(phase);
    if (flags & Tile::kAlone) {
      store_dq_rows(dq, shared_.tile[stage].query);
    } else {
#pragma unroll
      for (int block = 0; block < kOwnBlocks; ++block) write_fragments(dq[block], shared_.staging[tile_of(block)]);
      if constexpr (Traits::kAlternate) {
        ptx::arrive(shared_.dq_full[stage]);  // all lanes, as the other warpgroup writes there next
      } else {
        ptx::arrive_once(shared_.dq_full[stage]);
      }
    }
  }

  /// Stores a work tile's dk and dv or, in fp32, its part of them.
  __device__ __forceinline__ void store_dkv(const KeyGradients& dk, const ValueGradients& dv, int32_t key,
                                            int32_t group, int32_t batch, uint32_t phase) const {
    if constexpr (Traits::kSplit) {
      constexpr int kDkFloats = KeyFragments<Traits::kQkDim>::kTileFloats,
                    kDvFloats = KeyFragments<Traits::kVDim>::kTileFloats;
      float* parts = p_.key_parts + ((static_cast<int64_t>(batch) * p_.head_groups + group) * p_.schedule.tiles +
                                     key / Traits::kKeys) *
                                        (kDkFloats + kDvFloats);
      store_part<Traits::kQkDim>(dk, parts, phase);
      store_part<Traits::kVDim>(dv, parts + kDkFloats, phase);
    } else {
      const ptx::BoxOrigin at{key + static_cast<int32_t>(warpgroup_ * 64 + warp_ * 16), 0, group, batch};
      store_keys(p_.dv, dv, 1, at, phase);
      store_keys(p_.dk, dk, p_.softmax_scale, at, phase);
    }
  }

 private:
  using Swizzle = ptx::Swizzle128;

  __device__ __forceinline__ float* own_tile() const { return shared_.staging[warpgroup_ * 4 + warp_]; }
  /// The staging tile of the warp's 16 rows of one of the warpgroup's blocks of dq.
  __device__ __forceinline__ int tile_of(int block) const {
    return (Traits::kAlternate ? block : warpgroup_ * kOwnBlocks + block) * 4 + static_cast<int>(warp_);
  }
  /// Waits until all staging tiles may be overwritten.
  __device__ __forceinline__ void wait(uint32_t phase) const {
    if (ptx::is_leader()) ptx::bulk_wait_read();
    delay<Role::kConsumer>();
    ptx::wait(shared_.dq_empty, phase);
    __syncwarp();
  }

  /// Puts 16 x 64 values in a staging tile as the warp's lanes hold them.
  __device__ __forceinline__ static void write_fragments(const float* values, float* tile) {
    auto* to = reinterpret_cast<float4*>(tile) + ptx::lane();
#pragma unroll
    for (int e = 0; e < 8; ++e) to[e * 32] = {values[4 * e], values[4 * e + 1], values[4 * e + 2], values[4 * e + 3]};
    ptx::fence_async_proxy();
  }

  template <int kDim>
  __device__ __forceinline__ void store_part(const cuda::Accumulators<64, kDim>& gradients, float* part,
                                             uint32_t phase) const {
    using Part = KeyFragments<kDim>;
    float* to = part + (warpgroup_ * 4 + static_cast<int>(warp_)) * Part::kWarpFloats;
#pragma unroll
    for (int block = 0; block < kDim / 64; ++block) {
      wait(phase);
      write_fragments(gradients + 32 * block, own_tile());
      __syncwarp();
      delay<Role::kStore>();
      if (!ptx::is_leader()) continue;
      ptx::bulk_store(to + block * Part::kBlockFloats, own_tile(), Part::kBlockFloats * sizeof(float));
      ptx::bulk_commit();
    }
  }

  __device__ __forceinline__ void store_dq_rows(const OwnDq& dq, const QueryTile& of_leader) const {
    const auto tile = QueryTile::from_leader(of_leader);
#pragma unroll
    for (int block = 0; block < kOwnBlocks; ++block) {
      const int n = tile_of(block);
      write_rows(dq[block], p_.softmax_scale, shared_.staging[n]);
      store_tile(p_.dq,
                 {tile.row_tile * Traits::kRows + Blocks::row(n), Blocks::column_block(n),
                  static_cast<int32_t>(tile.head), static_cast<int32_t>(tile.batch)},
                 p_.seqlen_q, shared_.staging[n]);
    }
  }

  /// 16 keys by each warp.
  template <int kValues>
  __device__ __forceinline__ void store_keys(const CUtensorMap& map, const float (&gradients)[kValues], float factor,
                                             const ptx::BoxOrigin& at, uint32_t phase) const {
    wait(phase);
    write_rows(gradients, factor, own_tile());
    store_tile(map, at, p_.seqlen_k, own_tile());
  }

  /// Puts 16 rows of gradients in a staging tile as TMA stores them. Zeros become positive, as in sums of several
  /// tiles.
  template <int kValues>
  __device__ __forceinline__ void write_rows(const float (&gradients)[kValues], float factor, float* tile) const {
    const uint32_t row = ptx::lane() % 16, to = ptx::shared_address(tile) + row * Swizzle::kRow;
#pragma unroll
    for (int step = 0; step < kValues / 8; ++step) {
      const uint32_t chunk = step % 4 * 2 + ptx::lane() / 16;
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = gradients + 8 * step + 2 * i;
        words[i] = ptx::pack<Element>(__fmaf_rn(pair[0], factor, 0.f), __fmaf_rn(pair[1], factor, 0.f));
      }
      ptx::stmatrix_x4(to + step / 4 * Swizzle::block(16) + Swizzle::chunk(row, chunk), words[0], words[1], words[2],
                       words[3]);
    }
    ptx::fence_async_proxy();
    __syncwarp();
  }

  /// Stores a staging tile if it begins before `end`.
  __device__ __forceinline__ void store_tile(const CUtensorMap& map, const ptx::BoxOrigin& at, int32_t end,
                                             const float* tile) const {
    delay<Role::kStore>();
    if (!ptx::is_leader()) return;
    if (at.row < end) ptx::tma_store(map, tile, at);
    ptx::bulk_commit();
  }

  const Params& p_;
  Shared& shared_;
  const uint32_t warpgroup_;
  const uint32_t warp_;  ///< of the warpgroup
};

}  // namespace flashmask::sm90::bwd
