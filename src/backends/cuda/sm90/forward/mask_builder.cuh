// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/device/bit_tiles.cuh"
#include "backends/cuda/device/delay.cuh"
#include "backends/cuda/device/positions.cuh"
#include "backends/cuda/fragments/element_mask.cuh"
#include "backends/cuda/ptx/barrier.cuh"
#include "backends/cuda/ptx/registers.cuh"
#include "backends/cuda/sm90/forward/params.h"
#include "backends/cuda/sm90/forward/traits.cuh"

namespace flashmask::sm90 {

/// Recomputed at each use, so that nothing derived from it stays in registers.
__device__ __forceinline__ uint32_t lane_number() { return ptx::opaque(threadIdx.x % 32); }

/// The bounds of four keys of a lane; all loads are issued before any is used.
struct LaneBounds {
  const rules::Columns& mask;
  const volatile int64_t& offset;  ///< start of the mask in the vectors; read for each interval, to free its registers
  int32_t first;
  const int32_t (&at)[4];

  __device__ __forceinline__ bool operator()(int interval, int32_t (&begin)[4], int32_t (&end)[4]) const {
    const cuda::IntervalVectors vectors(mask, interval);
    if (!vectors.is_set()) return false;
    const int64_t base = offset + first * mask.stride;
    const auto place = [&](int c) { return base + at[c] * static_cast<int32_t>(mask.stride); };
#pragma unroll
    for (int c = 0; c < 4; ++c) begin[c] = vectors.begin_at([&] { return place(c); });
#pragma unroll
    for (int c = 0; c < 4; ++c) end[c] = vectors.end_at([&] { return place(c); });
    return true;
  }
};

/// A mask warp, one for each consumer warpgroup, in the producer's warpgroup: follows the tiles and computes which
/// elements of its warpgroup's partial granules are visible, in the order in which the consumers' registers hold
/// scores, so that a partial tile costs the consumers two loads and the selects.
template <typename Traits>
class MaskBuilder {
 public:
  using Shared = SharedStorage<Traits>;
  using Params = typename Traits::Params;
  __device__ __forceinline__ MaskBuilder(const Params& p, Shared& shared)
      : p_(p), shared_(shared), warpgroup_(static_cast<int>(ptx::uniform(threadIdx.x / 32)) - 1) {}

  __device__ __forceinline__ void run() {
    while (true) {
      const uint32_t slot = q_ring_.stage();
      delay<Role::kMask>();
      ptx::wait(shared_.q_full[slot], q_ring_.phase());
      const int32_t tiles = ptx::from_leader(work().tiles);
      if (tiles == WorkTile::kEnd) return;
      for (const uint32_t end = kv_ring_.count + tiles; kv_ring_.count != end; kv_ring_.advance()) follow_tile();
      ptx::arrive_once(shared_.q_empty[q_ring_.stage()]);
      q_ring_.advance();
    }
  }

 private:
  __device__ __forceinline__ const WorkTile& work() const { return shared_.work[q_ring_.stage()]; }
  __device__ __forceinline__ int64_t mask_offset() const { return shared_.mask_offset[q_ring_.stage()]; }

  __device__ __forceinline__ void follow_tile() {
    kv_ring_.count = ptx::uniform(kv_ring_.count);
    const uint32_t stage = kv_ring_.stage();
    delay<Role::kMask>();
    ptx::wait(shared_.k_full[stage][0], kv_ring_.phase());
    const Tile tile{ptx::from_leader(shared_.tile[stage].code)};
    ptx::arrive_once(shared_.k_empty[stage][0]);
    if (tile.is_partial(warpgroup_)) build(tile.key_block() * Traits::kKeys, tile.number(warpgroup_));
  }

  __device__ __forceinline__ void build(int32_t first_key, uint32_t number) {
    const int32_t row = work().row + 64 * warpgroup_;
    uint32_t bits[2][4];
    if (p_.element_mask == ElementMask::kBand) {
      visible_by_band(row, first_key, bits);
    } else if (p_.element_mask == ElementMask::kDense) {
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        for (int c = 0; c < 4; ++c) bits[0][c] = bits[1][c];
        visible_by_matrix(row + 32 * half, first_key, bits[1]);
      }
    } else {
      visible_by_columns(row, first_key, bits);
    }
    hand_over(bits, number);
  }

  __device__ __forceinline__ void hand_over(const uint32_t (&bits)[2][4], uint32_t number) {
    const uint32_t lane = lane_number(), slot = number % Traits::kMaskSlots, phase = number / Traits::kMaskSlots & 1;
    auto& buffer = shared_.mask_bits[warpgroup_][slot];
    constexpr int kParts = Traits::kMaskParts;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      delay<Role::kMask>();
      // If a granule has parts, the previous part's readers were the last to read the buffer.
      ptx::wait(shared_.mask_empty[warpgroup_][slot][(part + kParts - 1) % kParts], part == 0 ? phase ^ 1 : phase);
#pragma unroll
      for (int half = part; half < 2; half += kParts) {
        *reinterpret_cast<uint4*>(buffer.row[(lane + 32 * half) % Traits::kMaskRows]) = {bits[half][0], bits[half][1],
                                                                                         bits[half][2], bits[half][3]};
      }
      ptx::arrive(shared_.mask_full[warpgroup_][slot][part]);
    }
  }

  /// From the band alone: a lane computes two rows.
  __device__ __forceinline__ void visible_by_band(int32_t row, int32_t first_key, uint32_t (&bits)[2][4]) const {
    const auto lane = static_cast<int32_t>(lane_number());
    const rules::TileBand band = rules::tile_band(p_.mask.first, first_key, row);
    const int32_t keys = min(p_.seqlen_k - first_key, Traits::kKeys);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const rules::Interval seen = rules::columns_in_band(band, lane + 32 * half);
      const int32_t end = max(min(seen.end, keys), 0), begin = max(min(seen.begin, keys), 0);
#pragma unroll
      for (int c = 0; c < 4; ++c) bits[half][c] = cuda::mask_word_before(end, c);
      if (band.bottom >= 64) continue;
#pragma unroll
      for (int c = 0; c < 4; ++c) bits[half][c] &= ~cuda::mask_word_before(begin, c);
    }
  }

  /// From the mask's columns: a lane has all rows of four of them, then the lanes exchange rows and columns.
  __device__ __forceinline__ void visible_by_columns(int32_t row, int32_t first_key, uint32_t (&bits)[2][4]) const {
    if (p_.element_mask == ElementMask::kBits) {
      read_tile(row, first_key, bits);
    } else {
      compute_columns(row, first_key, bits);
    }
    hide_beyond(p_.seqlen_k - static_cast<int32_t>(ptx::opaque(first_key)), bits);
    const uint32_t lane = lane_number();
    cuda::transpose_between_lanes(lane, bits[0]);
    cuda::transpose_between_lanes(lane, bits[1]);
  }

  /// From a tile of the plan.
  __device__ __forceinline__ void read_tile(int32_t row, int32_t first_key, uint32_t (&bits)[2][4]) const {
    const auto key = static_cast<int32_t>(cuda::mask_key(lane_number(), 0));
    const cuda::BitTile tile = cuda::find_tile(p_.bits, mask_offset(), row / 64, first_key / Traits::kKeys);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const uint2 rows = tile.rows(key + 2 * c);
      bits[0][c] = rows.x;
      bits[1][c] = rows.y;
    }
  }

  /// From the mask's vectors and positions.
  __device__ __forceinline__ void compute_columns(int32_t row, int32_t first_key, uint32_t (&bits)[2][4]) const {
    const auto key = static_cast<int32_t>(cuda::mask_key(lane_number(), 0));
    const int32_t last = p_.seqlen_k - 1 - first_key;
    const int32_t at[4] = {min(key, last), min(key + 2, last), min(key + 4, last), min(key + 6, last)};
    const LaneBounds bounds{p_.mask.first, shared_.mask_offset[q_ring_.stage()], first_key, at};
    rules::visible_windows<Traits::kKeys>(p_.mask.first, bounds, first_key, at, row, bits);
    if constexpr (cuda::kHasPositions<Params>) {
      const cuda::PositionParams& positions = p_.features.positions;
      if (positions.is_set()) {
        int32_t position[4];
        cuda::read_positions(positions, work().batch, first_key, at, position);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const auto own_row = cuda::seen_by_lane(positions, work().batch, row + 32 * half, p_.seqlen_q);
          cuda::hide_by_positions(own_row, position, bits[half]);
        }
      }
    }
  }

  /// Hides the columns of a lane from number `keys` of the tile on.
  __device__ __forceinline__ static void hide_beyond(int32_t keys, uint32_t (&bits)[2][4]) {
    if (keys >= Traits::kKeys) return;
    const auto key = static_cast<int32_t>(cuda::mask_key(lane_number(), 0));
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (key + 2 * c >= keys) bits[0][c] = bits[1][c] = 0;
    }
  }

  /// From a dense mask: the lanes read a row's keys, and vote.
  __device__ __forceinline__ void visible_by_matrix(int32_t row, int32_t first_key, uint32_t (&bits)[4]) const {
    const uint32_t lane = lane_number();
    const int32_t key = first_key + static_cast<int32_t>(cuda::mask_key(lane, 0));
    const uint8_t* place = p_.dense.visible + mask_offset() + row * p_.dense.row_stride + key * p_.dense.key_stride;
#pragma unroll 1
    for (int r = 0; r < 32; ++r) {
      bool visible[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const bool inside = row + r < p_.seqlen_q && key + 2 * c < p_.seqlen_k;
        visible[c] = inside && place[2 * c * p_.dense.key_stride];
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const uint32_t word = __ballot_sync(0xffffffff, visible[c]);
        if (lane == r) bits[c] = word;
      }
      place += p_.dense.row_stride;
    }
  }

  const Params& p_;
  Shared& shared_;
  const int warpgroup_;
  ptx::RingPosition<Traits::kQBuffers> q_ring_;
  ptx::RingPosition<Traits::kStages> kv_ring_;
};

}  // namespace flashmask::sm90
