// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/device/bit_tiles.cuh"
#include "backends/cuda/device/mask_params.h"
#include "backends/cuda/device/positions.cuh"
#include "backends/cuda/fragments/element_mask.cuh"
#include "backends/cuda/ptx/registers.cuh"

namespace flashmask::sm80 {

/// Which elements of 32 rows x 128 keys are visible, computed by a warp; a lane has the words of one row, see
/// cuda::MaskBits. Params has the mask, the dense mask, and which of them says it; FeaturedForwardParams' like
/// positions, too.
template <typename Params>
class ElementBits {
 public:
  static constexpr int kRows = 32, kKeys = 128;

  /// `offset` is of the head's mask: elements of the column vectors, words of the plan's bits, bytes of a dense mask.
  __device__ __forceinline__ ElementBits(const Params& p, int64_t offset, uint32_t batch, int32_t row,
                                         int32_t first_key)
      : p_(p), offset_(offset), batch_(batch), row_(row), first_key_(first_key) {}

  __device__ __forceinline__ void compute(uint32_t (&bits)[4]) const {
    if (p_.element_mask == cuda::ElementMask::kBand) {
      by_band(bits);
    } else if (p_.element_mask == cuda::ElementMask::kDense) {
      by_matrix(bits);
    } else if (p_.element_mask == cuda::ElementMask::kBits) {
      by_tile(bits);
    } else {
      by_columns(bits);
    }
  }

 private:
  /// From the band alone: a lane computes its row.
  __device__ __forceinline__ void by_band(uint32_t (&bits)[4]) const {
    const rules::TileBand band = rules::tile_band(p_.mask.first, first_key_, row_);
    const int32_t keys = min(p_.seqlen_k - first_key_, kKeys);
    const rules::Interval seen = rules::columns_in_band(band, static_cast<int32_t>(ptx::lane()));
    const int32_t end = max(min(seen.end, keys), 0), begin = max(min(seen.begin, keys), 0);
#pragma unroll
    for (int c = 0; c < 4; ++c) bits[c] = cuda::mask_word_before(end, c) & ~cuda::mask_word_before(begin, c);
  }

  /// From the mask's vectors and positions: a lane computes all rows of four columns, then the lanes exchange rows and
  /// columns.
  __device__ __forceinline__ void by_columns(uint32_t (&bits)[4]) const {
    const auto key = static_cast<int32_t>(cuda::mask_key(ptx::lane(), 0));
    const int32_t last = p_.seqlen_k - 1 - first_key_;
    const int32_t at[4] = {min(key, last), min(key + 2, last), min(key + 4, last), min(key + 6, last)};
    const auto bounds = [&](int interval, int32_t (&begin)[4], int32_t (&end)[4]) {
      const cuda::IntervalVectors vectors(p_.mask.first, interval);
      if (!vectors.is_set()) return false;
      const auto place = [&](int c) {
        return offset_ + static_cast<int64_t>(first_key_ + at[c]) * p_.mask.first.stride;
      };
#pragma unroll
      for (int c = 0; c < 4; ++c) begin[c] = vectors.begin_at([&] { return place(c); });
#pragma unroll
      for (int c = 0; c < 4; ++c) end[c] = vectors.end_at([&] { return place(c); });
      return true;
    };
    uint32_t of_columns[1][4];
    rules::visible_windows<kKeys>(p_.mask.first, bounds, first_key_, at, row_, of_columns);
#pragma unroll
    for (int c = 0; c < 4; ++c) bits[c] = key + 2 * c <= last ? of_columns[0][c] : 0;
    if constexpr (cuda::kHasPositions<Params>) {
      const cuda::PositionParams& positions = p_.features.positions;
      if (positions.is_set()) {
        int32_t position[4];
        cuda::read_positions(positions, batch_, first_key_, at, position);
        cuda::hide_by_positions(cuda::seen_by_lane(positions, batch_, row_, p_.seqlen_q), position, bits);
      }
    }
    cuda::transpose_between_lanes(ptx::lane(), bits);
  }

  /// From a tile of the plan: a lane reads the rows of four columns, then the lanes exchange rows and columns.
  __device__ __forceinline__ void by_tile(uint32_t (&bits)[4]) const {
    const auto key = static_cast<int32_t>(cuda::mask_key(ptx::lane(), 0));
    const cuda::BitTile tile = cuda::find_tile(p_.bits, offset_, row_ / 64, first_key_ / kKeys);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const uint2 rows = tile.rows(key + 2 * c);
      bits[c] = first_key_ + key + 2 * c >= p_.seqlen_k ? 0 : row_ % 64 < kRows ? rows.x : rows.y;
    }
    cuda::transpose_between_lanes(ptx::lane(), bits);
  }

  /// From a dense mask: the lanes read a row's keys, and vote.
  __device__ __forceinline__ void by_matrix(uint32_t (&bits)[4]) const {
    const uint32_t lane = ptx::lane();
    const int32_t key = first_key_ + static_cast<int32_t>(cuda::mask_key(lane, 0));
    const uint8_t* place = p_.dense.visible + offset_ + row_ * p_.dense.row_stride + key * p_.dense.key_stride;
#pragma unroll 1
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const bool inside = row_ + r < p_.seqlen_q && key + 2 * c < p_.seqlen_k;
        const uint32_t word = __ballot_sync(0xffffffff, inside && place[2 * c * p_.dense.key_stride]);
        if (lane == static_cast<uint32_t>(r)) bits[c] = word;
      }
      place += p_.dense.row_stride;
    }
  }

  const Params& p_;
  int64_t offset_;
  uint32_t batch_;
  int32_t row_, first_key_;
};

}  // namespace flashmask::sm80
