// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/common/delay.cuh"
#include "backends/cuda/ptx/barrier.cuh"
#include "backends/cuda/ptx/tensor_core.cuh"
#include "backends/cuda/ptx/tma.cuh"
#include "backends/cuda/sm90/backward/params.h"
#include "backends/cuda/sm90/backward/traits.cuh"

namespace flashmask::sm90::grad {

/// The buffer that a warpgroup's dq, dk and dv leave through, as one of its warps sees it. It has a piece for each
/// consumer warp. A warp's dk and dv keep to its own; the two blocks of a whole dq go to pieces of either warpgroup.
template <typename Traits>
class Pieces {
 public:
  using Shared = SharedStorage<Traits>;
  using Element = typename Traits::Element;
  using Part = Fragments<Traits::kHeadDim>;
  using KeyPart = KeyFragments<Traits::kHeadDim>;
  using Gradients = float[Traits::kHeadDim / 2];  ///< 64 keys x head dim
  static constexpr int kRowBlocks = Traits::kAlternate ? 2 : 1;
  using RowGradients = float[kRowBlocks][32];  ///< blocks of a tile's dq that the warpgroup works out, see Fragments

  __device__ __forceinline__ Pieces(const BackwardParams& p, Shared& shared, uint32_t warpgroup)
      : p_(p), shared_(shared), warpgroup_(warpgroup), warp_(ptx::uniform(threadIdx.x / 32 % 4)) {}

  /// Until others may overwrite the pieces that this warp has stored from.
  __device__ __forceinline__ static void leave() {
    if (leader()) ptx::bulk_wait_read();
    __syncwarp();
  }
  /// Until what this warp has stored is in memory.
  __device__ __forceinline__ static void leave_kernel() {
    if (leader()) ptx::bulk_wait();
  }

  /// Stores a tile's dq, if no other tile contributes to it, or gives it to the store warp.
  __device__ __forceinline__ void give(const RowGradients& dq, uint32_t flags, uint32_t stage, uint32_t phase) const {
    wait(phase);
    if (flags & Tile::kAlone) {
      store_rows(dq, shared_.tile[stage].query);
    } else {
#pragma unroll
      for (int block = 0; block < kRowBlocks; ++block) write_fragments(dq[block], shared_.out[piece_of(block)]);
      if constexpr (Traits::kAlternate) {
        ptx::arrive(shared_.dq_full[stage]);  // all lanes, as the other warpgroup writes there next
      } else {
        release(shared_.dq_full[stage]);
      }
    }
  }

  /// Stores an item's dk and dv or, in fp32, its part of them.
  __device__ __forceinline__ void store(const Gradients& dk, const Gradients& dv, int32_t key, int32_t group,
                                        int32_t batch, uint32_t phase) const {
    if constexpr (Traits::kSplit) {
      float* parts = p_.key_parts + ((static_cast<int64_t>(batch) * p_.head_groups + group) * p_.schedule.tiles +
                                     key / Traits::kKeys) *
                                        2 * KeyPart::kTileFloats;
      store_part(dk, parts, phase);
      store_part(dv, parts + KeyPart::kTileFloats, phase);
    } else {
      const ptx::BoxOrigin at{key + static_cast<int32_t>(warpgroup_ * 64 + warp_ * 16), 0, group, batch};
      store_keys(p_.dv, dv, 1, at, phase);
      store_keys(p_.dk, dk, p_.scale, at, phase);
    }
  }

 private:
  __device__ __forceinline__ static uint32_t lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ static bool leader() { return lane() == 0; }
  __device__ __forceinline__ static void release(uint64_t& barrier) {
    __syncwarp();
    if (leader()) ptx::arrive(barrier);
  }
  __device__ __forceinline__ float* own_piece() const { return shared_.out[warpgroup_ * 4 + warp_]; }
  __device__ __forceinline__ int piece_of(int block) const {
    return (Traits::kAlternate ? block : warpgroup_) * 4 + static_cast<int>(warp_);
  }
  /// Until everybody's pieces may be overwritten.
  __device__ __forceinline__ void wait(uint32_t phase) const {
    if (leader()) ptx::bulk_wait_read();
    delay<Role::kConsumer>();
    ptx::wait(shared_.dq_empty, phase);
    __syncwarp();
  }

  /// Puts 16 x 64 values in a piece as the warp's lanes hold them.
  __device__ __forceinline__ static void write_fragments(const float* values, float* piece) {
    auto* to = reinterpret_cast<float4*>(piece) + lane();
#pragma unroll
    for (int e = 0; e < 8; ++e) to[e * 32] = {values[4 * e], values[4 * e + 1], values[4 * e + 2], values[4 * e + 3]};
    ptx::fence_async_proxy();
  }

  __device__ __forceinline__ void store_part(const Gradients& gradients, float* part, uint32_t phase) const {
    float* to = part + (warpgroup_ * 4 + static_cast<int>(warp_)) * KeyPart::kWarpFloats;
#pragma unroll
    for (int block = 0; block < Traits::kHeadDim / 64; ++block) {
      wait(phase);
      write_fragments(gradients + 32 * block, own_piece());
      __syncwarp();
      delay<Role::kStore>();
      if (!leader()) continue;
      ptx::bulk_store(to + block * KeyPart::kBlockFloats, own_piece(), KeyPart::kBlockFloats * sizeof(float));
      ptx::bulk_commit();
    }
  }

  __device__ __forceinline__ void store_rows(const RowGradients& dq, const QueryTile& of_leader) const {
    const auto tile = QueryTile::from_leader(of_leader);
#pragma unroll
    for (int block = 0; block < kRowBlocks; ++block) {
      const int n = piece_of(block);
      write_piece(dq[block], p_.scale, shared_.out[n]);
      store_piece(p_.dq,
                  {tile.row_tile * Traits::kRows + Part::row(n), Part::column(n) / 64, static_cast<int32_t>(tile.head),
                   static_cast<int32_t>(tile.batch)},
                  p_.seqlen_q, shared_.out[n]);
    }
  }

  /// 16 keys by each warp.
  __device__ __forceinline__ void store_keys(const CUtensorMap& map, const Gradients& gradients, float factor,
                                             const ptx::BoxOrigin& at, uint32_t phase) const {
    wait(phase);
    write_piece(gradients, factor, own_piece());
    store_piece(map, at, p_.seqlen_k, own_piece());
  }

  /// Puts 16 rows of gradients in a piece as TMA stores them. Zeros become positive, as sums of several tiles' are.
  template <int kValues>
  __device__ __forceinline__ void write_piece(const float (&gradients)[kValues], float factor, float* piece) const {
    const uint32_t row = lane() % 16, to = ptx::shared_address(piece) + row * 128;
#pragma unroll
    for (int step = 0; step < kValues / 8; ++step) {
      const uint32_t chunk = step % 4 * 2 + lane() / 16;
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = gradients + 8 * step + 2 * i;
        words[i] = ptx::pack<Element>(__fmaf_rn(pair[0], factor, 0.f), __fmaf_rn(pair[1], factor, 0.f));
      }
      ptx::stmatrix_x4(to + step / 4 * 2048 + ((chunk ^ row % 8) << 4), words[0], words[1], words[2], words[3]);
    }
    ptx::fence_async_proxy();
    __syncwarp();
  }

  /// Stores a piece where it begins before `end`.
  __device__ __forceinline__ void store_piece(const CUtensorMap& map, const ptx::BoxOrigin& at, int32_t end,
                                              const float* piece) const {
    delay<Role::kStore>();
    if (!leader()) return;
    if (at.row < end) ptx::tma_store(map, piece, at);
    ptx::bulk_commit();
  }

  const BackwardParams& p_;
  Shared& shared_;
  const uint32_t warpgroup_;
  const uint32_t warp_;  ///< of the warpgroup
};

}  // namespace flashmask::sm90::grad
