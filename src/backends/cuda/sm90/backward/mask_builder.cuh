// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/common/delay.cuh"
#include "backends/cuda/ptx/barrier.cuh"
#include "backends/cuda/ptx/tensor_core.cuh"
#include "backends/cuda/sm90/backward/params.h"
#include "backends/cuda/sm90/backward/traits.cuh"

namespace flashmask::sm90::grad {

/// The mask warp, beside the producer: follows the tiles and works out which rows of partial ones see each key. The
/// consumers hold scores with keys along their rows, so a thread needs the bits of just two keys, as they are.
template <typename Traits>
class MaskBuilder {
 public:
  using Shared = SharedStorage<Traits>;
  using Bits = ColumnBits<Traits::kRows>;
  __device__ __forceinline__ MaskBuilder(const BackwardParams& p, Shared& shared) : p_(p), shared_(shared) {}

  __device__ __forceinline__ void run() {
    while (true) {
      const uint32_t stage = ring_.stage();
      delay<Role::kMask>();
      ptx::wait(shared_.tile_full[stage], ring_.phase());
      const uint32_t flags = ptx::from_leader(tile().flags);
      if (flags & Tile::kEnd) return;
      if (flags & Tile::kPartial) {
        ptx::wait(shared_.scores_full[stage], ring_.phase() ^ 1);
        build();
        ptx::arrive(shared_.mask_full[stage]);
      }
      __syncwarp();
      if (threadIdx.x % 32 == 0) ptx::arrive(shared_.q_empty[stage]);
      ring_.advance();
    }
  }

 private:
  __device__ __forceinline__ const Tile& tile() const { return shared_.tile[ring_.stage()]; }

  __device__ __forceinline__ void build() {
    const int32_t first_key = ptx::from_leader(tile().key_tile) * Traits::kKeys,
                  row = ptx::from_leader(tile().query.row_tile) * Traits::kRows;
    const PerHead& place = p_.dense.given ? p_.dense.place : p_.mask.place;
    const int64_t offset = place.offset(ptx::from_leader(tile().query.batch), ptx::from_leader(tile().query.head));
#pragma unroll 1
    for (int32_t key = static_cast<int32_t>(threadIdx.x % 32); key < Traits::kKeys; key += 32) {
      Bits& bits = shared_.mask_bits[ring_.stage()][key];
      if (first_key + key >= p_.seqlen_k) {
        bits = {};
      } else if (p_.dense.given) {
        bits = by_matrix(offset, row, first_key + key);
      } else {
        bits = by_columns(offset, row, first_key, key);
      }
    }
  }

  /// By the mask's vectors.
  __device__ __forceinline__ Bits by_columns(int64_t offset, int32_t row, int32_t first_key, int32_t key) const {
    rules::Columns columns = p_.mask.first;
    if (columns.lts) columns.lts += offset;
    if (columns.lte) columns.lte += offset;
    if (columns.uts) columns.uts += offset;
    if (columns.ute) columns.ute += offset;
    constexpr int kWords = Traits::kRows / 32;
    const int32_t at[1] = {key};
    uint32_t bits[kWords][1];
    rules::visible_windows<Traits::kKeys>(columns, rules::StoredBounds<1>{columns, first_key, at}, first_key, at, row, bits);
    Bits result;
#pragma unroll
    for (int word = 0; word < kWords; ++word) result.word[word] = bits[word][0];
    return result;
  }

  /// By a dense mask.
  __device__ __forceinline__ Bits by_matrix(int64_t offset, int32_t row, int32_t key) const {
    const uint8_t* place = p_.dense.visible + offset + row * p_.dense.row_stride + key * p_.dense.key_stride;
    const int32_t rows = min(Traits::kRows, p_.seqlen_q - row);
    Bits result{};
#pragma unroll
    for (int word = 0; word < Traits::kRows / 32; ++word) {
#pragma unroll 4
      for (int r = 0; r < 32; ++r) {
        if (32 * word + r < rows && place[r * p_.dense.row_stride]) result.word[word] |= 1u << r;
      }
      place += 32 * p_.dense.row_stride;
    }
    return result;
  }

  const BackwardParams& p_;
  Shared& shared_;
  ptx::RingPosition<Traits::kStages> ring_;
};

}  // namespace flashmask::sm90::grad
