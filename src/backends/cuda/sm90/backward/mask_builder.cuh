// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <type_traits>

#include "backends/cuda/device/bit_tiles.cuh"
#include "backends/cuda/device/delay.cuh"
#include "backends/cuda/device/positions.cuh"
#include "backends/cuda/fragments/element_mask.cuh"
#include "backends/cuda/ptx/barrier.cuh"
#include "backends/cuda/ptx/registers.cuh"
#include "backends/cuda/sm90/backward/params.h"
#include "backends/cuda/sm90/backward/traits.cuh"

namespace flashmask::sm90::bwd {

/// The bounds of a lane's keys key, key + 32, ..., which the lane itself has put in shared memory.
template <int kKeys, int n>
struct LaneBounds {
  const rules::Columns& mask;
  const ColumnBounds<kKeys>& bounds;
  int32_t key;

  __device__ __forceinline__ bool operator()(int interval, int32_t (&begin)[n], int32_t (&end)[n]) const {
    if (interval == 0 ? !mask.lts && !mask.lte : !mask.uts && !mask.ute) return false;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      begin[i] = bounds.begin[interval][key + 32 * i];
      end[i] = bounds.end[interval][key + 32 * i];
    }
    return true;
  }
};

/// The mask warp, in the producer's warpgroup: follows the tiles and computes which rows of partial ones see each key.
/// The consumers hold scores with keys along their rows, so a thread needs the bits of just two keys.
template <typename Traits>
class MaskBuilder {
 public:
  using Shared = SharedStorage<Traits>;
  using Params = typename Traits::Params;
  using Bits = ColumnBits<Traits::kRows>;
  static constexpr int kWords = Traits::kRows / 32;
  /// Columns of a lane at a time: all, or as many as its registers hold.
  static constexpr int kMost = (kHalves<Traits> ? 4 : 8) / kWords;
  static constexpr int kAtOnce = kMost < Traits::kKeys / 32 ? kMost : Traits::kKeys / 32;
  /// Reads all of a lane's columns of a bit tile at once. Two granules at a time cost full tiles 1 % at d = 64.
  static constexpr bool kReadsTogether = kWords == 2;
  /// True if there are registers for what find_tile keeps.
  static constexpr bool kKeepsTiles = kReadsTogether && !kHalves<Traits>;
  __device__ __forceinline__ MaskBuilder(const Params& p, Shared& shared) : p_(p), shared_(shared) {}

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
      ptx::arrive_once(shared_.q_empty[stage]);
      ring_.advance();
    }
  }

 private:
  __device__ __forceinline__ const Tile& tile() const { return shared_.tile[ring_.stage()]; }

  __device__ __forceinline__ void build() {
    const int32_t first_key = ptx::from_leader(tile().key_tile) * Traits::kKeys,
                  row = ptx::from_leader(tile().query.row_tile) * Traits::kRows;
    const cuda::PerHead& place = p_.dense.is_set ? p_.dense.place : p_.mask.place;
    const int64_t offset = place.offset(ptx::from_leader(tile().query.batch), ptx::from_leader(tile().query.head));
    if (p_.bits.is_set()) return read_tiles(offset, row, first_key);
    if (!p_.dense.is_set) read_bounds(offset, first_key);
#pragma unroll 1
    for (int32_t key = static_cast<int32_t>(threadIdx.x % 32); key < Traits::kKeys; key += 32 * kAtOnce) {
      if (p_.dense.is_set) {
        for (int n = 0; n < kAtOnce; ++n) by_matrix(offset, row, first_key, key + 32 * n);
      } else {
        by_columns(row, first_key, key);
      }
    }
    if constexpr (cuda::kHasPositions<Params>) {
      if (p_.features.positions.is_set()) by_positions(row, first_key);
    }
  }
  /// From the plan's tiles of a tile's granules. Where kReadsTogether, all loads are issued before any is used.
  __device__ __forceinline__ void read_tiles(int64_t offset, int32_t row, int32_t first_key) {
    constexpr int kOwn = Traits::kKeys / 32;
    const auto key = static_cast<int32_t>(threadIdx.x % 32);
    const int32_t place = first_key % cuda::BitTiles::kKeys + key;
#pragma unroll 1
    for (int g = 0; g < kWords / 2; ++g) {
      const cuda::BitTile tile = find_tile(offset, row / 64 + g, first_key / cuda::BitTiles::kKeys);
      if constexpr (kReadsTogether) {
        uint2 rows[kOwn];
#pragma unroll
        for (int n = 0; n < kOwn; ++n) rows[n] = tile.rows(place + 32 * n);
#pragma unroll
        for (int n = 0; n < kOwn; ++n) write(first_key, key + 32 * n, g, rows[n]);
      } else {
#pragma unroll
        for (int n = 0; n < kOwn; ++n) write(first_key, key + 32 * n, g, tile.rows(place + 32 * n));
      }
    }
  }

  /// Finds the tile of a granule, which may lie past the last. Where kKeepsTiles, a lane keeps that of one in 32
  /// granules, so that few tiles wait for it.
  __device__ __forceinline__ cuda::BitTile find_tile(int64_t offset, int32_t granule, int32_t key_block) {
    if constexpr (!kKeepsTiles) {
      return cuda::find_tile(p_.bits, offset, granule, key_block);
    } else {
      const int32_t first = granule / 32 * 32;
      const int64_t place = (offset + first * int64_t{p_.bits.words_per_row}) * 32 + key_block;
      if (place != kept_of_) {
        kept_of_ = place;
        own_tile_ = cuda::find_tile(p_.bits, offset, first + static_cast<int32_t>(threadIdx.x % 32), key_block);
      }
      return cuda::read_lane_tile(own_tile_, granule % 32);
    }
  }

  /// Hands a granule's bits of a column to the consumers, hidden past the last column.
  __device__ __forceinline__ void write(int32_t first_key, int32_t key, int granule, uint2 rows) {
    Bits& bits = shared_.mask_bits[ring_.stage()][key];
    bits.word[2 * granule] = first_key + key < p_.seqlen_k ? Bits::by_lanes(rows.x) : 0;
    bits.word[2 * granule + 1] = first_key + key < p_.seqlen_k ? Bits::by_lanes(rows.y) : 0;
  }

  /// Hands the bits of a column to the consumers; columns past the last are hidden.
  __device__ __forceinline__ void write(int32_t first_key, int32_t key, const uint32_t (&visible)[kWords]) {
    Bits& bits = shared_.mask_bits[ring_.stage()][key];
#pragma unroll
    for (int word = 0; word < kWords; ++word)
      bits.word[word] = first_key + key < p_.seqlen_k ? Bits::by_lanes(visible[word]) : 0;
  }

  /// Puts the bounds of the lane's keys in shared memory, where they serve all tiles of a work tile. All loads of an
  /// interval are issued before any is used.
  __device__ __forceinline__ void read_bounds(int64_t offset, int32_t first_key) {
    const rules::Columns& mask = p_.mask.first;
    const int64_t first = offset + first_key * mask.stride;
    if (first == kept_of_) return;
    kept_of_ = first;
    constexpr int kOwn = Traits::kKeys / 32;
    const auto key = static_cast<int32_t>(threadIdx.x % 32);
#pragma unroll 1
    for (int interval = 0; interval < 2; ++interval) {
      const cuda::IntervalVectors vectors(mask, interval);
      if (!vectors.is_set()) continue;
      int32_t begin[kOwn], end[kOwn];
#pragma unroll
      for (int n = 0; n < kOwn; ++n) {
        const int64_t at = first + min(key + 32 * n, p_.seqlen_k - 1 - first_key) * static_cast<int32_t>(mask.stride);
        begin[n] = vectors.begin_at([&] { return at; });
        end[n] = vectors.end_at([&] { return at; });
      }
#pragma unroll
      for (int n = 0; n < kOwn; ++n) {
        shared_.bounds.begin[interval][key + 32 * n] = begin[n];
        shared_.bounds.end[interval][key + 32 * n] = end[n];
      }
    }
  }

  /// From the mask's vectors: columns key, key + 32, ...
  __device__ __forceinline__ void by_columns(int32_t row, int32_t first_key, int32_t key) {
    int32_t at[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) at[n] = min(key + 32 * n, p_.seqlen_k - 1 - first_key);
    uint32_t bits[kWords][kAtOnce];
    const rules::Columns& mask = p_.mask.first;
    const LaneBounds<Traits::kKeys, kAtOnce> bounds{mask, shared_.bounds, key};
    rules::visible_windows<Traits::kKeys>(mask, bounds, first_key, at, row, bits);
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      uint32_t visible[kWords];
#pragma unroll
      for (int word = 0; word < kWords; ++word) visible[word] = bits[word][n];
      write(first_key, key + 32 * n, visible);
    }
  }

  /// Applies the band over positions to the columns that the lane has written. Called after all are written, as there
  /// are no registers for both.
  __device__ __forceinline__ void by_positions(int32_t row, int32_t first_key) {
    const cuda::PositionParams& positions = p_.features.positions;
    const uint32_t batch = ptx::from_leader(tile().query.batch);
    const auto lane = static_cast<int32_t>(threadIdx.x % 32);
#pragma unroll 1
    for (int32_t key = lane; key < Traits::kKeys; key += 32 * kAtOnce) {
      int32_t at[kAtOnce], position[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) at[n] = min(key + 32 * n, p_.seqlen_k - 1 - first_key);
      cuda::read_positions(positions, batch, first_key, at, position);
#pragma unroll 1
      for (int word = 0; word < kWords; ++word) {
        uint32_t seen[kAtOnce];
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) seen[n] = ~0u;
        cuda::hide_by_positions(cuda::seen_by_lane(positions, batch, row + 32 * word, p_.seqlen_q), position, seen);
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n)
          shared_.mask_bits[ring_.stage()][key + 32 * n].word[word] &= Bits::by_lanes(seen[n]);
      }
    }
  }

  /// From a dense mask.
  __device__ __forceinline__ void by_matrix(int64_t offset, int32_t row, int32_t first_key, int32_t key) {
    const uint8_t* place =
        p_.dense.visible + offset + row * p_.dense.row_stride + (first_key + key) * p_.dense.key_stride;
    const int32_t rows = first_key + key < p_.seqlen_k ? min(Traits::kRows, p_.seqlen_q - row) : 0;
    uint32_t visible[kWords] = {};
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
#pragma unroll 4
      for (int r = 0; r < 32; ++r) {
        if (32 * word + r < rows && place[r * p_.dense.row_stride]) visible[word] |= 1u << r;
      }
      place += 32 * p_.dense.row_stride;
    }
    write(first_key, key, visible);
  }

  const Params& p_;
  Shared& shared_;
  ptx::RingPosition<Traits::kStages> ring_;
  [[no_unique_address]] std::conditional_t<kKeepsTiles, cuda::BitTile, NoStorage> own_tile_{};  ///< see find_tile
  /// Which columns' bounds are in shared memory, by the first one's place in the vectors; or which granules' tiles the
  /// lanes have, by the first one's place in the plan.
  int64_t kept_of_ = -1;
};

}  // namespace flashmask::sm90::bwd
