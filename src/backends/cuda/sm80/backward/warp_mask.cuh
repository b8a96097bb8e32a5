// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/device/bit_tiles.cuh"
#include "backends/cuda/device/positions.cuh"
#include "backends/cuda/fragments/element_mask.cuh"
#include "backends/cuda/fragments/fragments.cuh"
#include "backends/cuda/ptx/registers.cuh"
#include "backends/cuda/sm80/backward/params.h"

namespace flashmask::sm80::bwd {

/// Which elements of a warp's kRows x kKeys scores are visible. A lane computes the rows of one key in 32, and gets the
/// bits of its fragments' keys from the lanes that have them.
template <int kRows, int kKeys>
class WarpMask {
 public:
  static_assert(kRows <= 32 && (kKeys == 16 || kKeys % 32 == 0));
  static constexpr int kWords = (kKeys + 31) / 32;

  /// The warp's scores begin at row `row`, and at key `key` of the kTileKeys of a tile that begins at first_key.
  template <int kTileKeys>
  __device__ __forceinline__ void compute(const BackwardParams& p, uint32_t batch, uint32_t head, int32_t row,
                                          int32_t first_key, int32_t key) {
    int32_t own[kWords], at[kWords];
#pragma unroll
    for (int n = 0; n < kWords; ++n) {
      own[n] = key + 32 * n + static_cast<int32_t>(ptx::lane()) % (kKeys < 32 ? kKeys : 32);
      at[n] = min(own[n], p.seqlen_k - 1 - first_key);
    }
    if (p.dense.is_set) {
      by_matrix(p, p.dense.place.offset(batch, head), row, first_key, at);
    } else if (p.bits.is_set()) {
      by_tile(p, p.mask.place.offset(batch, head), row, first_key, at);
    } else {
      by_columns<kTileKeys>(p, p.mask.place.offset(batch, head), batch, row, first_key, at);
    }
#pragma unroll
    for (int n = 0; n < kWords; ++n) {
      if (own[n] != at[n]) word_[n] = 0;
    }
  }

  /// Makes hidden scores -inf.
  template <int kSlabs, int kScores>
  __device__ __forceinline__ void hide(float (&s)[kSlabs][kScores]) const {
    static_assert(kSlabs * 16 == kRows && 2 * kScores == kKeys);
    const int c = cuda::Slab::column_pair(), g = cuda::Slab::row_in_eight();
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const uint32_t rows = __shfl_sync(0xffffffff, word_[j / 4], 8 * (j % 4) + 2 * c + e) >> g;
#pragma unroll
        for (int i = 0; i < 2 * kSlabs; ++i) ptx::hide_unless(rows & 1u << 8 * i, s[i / 2][4 * j + i % 2 * 2 + e]);
      }
    }
  }

 private:
  template <int kTileKeys>
  __device__ __forceinline__ void by_columns(const BackwardParams& p, int64_t offset, uint32_t batch, int32_t row,
                                             int32_t first_key, const int32_t (&at)[kWords]) {
    const rules::Columns& mask = p.mask.first;
    const auto bounds = [&](int interval, int32_t (&begin)[kWords], int32_t (&end)[kWords]) {
      const cuda::IntervalVectors vectors(mask, interval);
      if (!vectors.is_set()) return false;
#pragma unroll
      for (int n = 0; n < kWords; ++n) {
        const auto place = [&] { return offset + (first_key + at[n]) * mask.stride; };
        begin[n] = vectors.begin_at(place);
        end[n] = vectors.end_at(place);
      }
      return true;
    };
    uint32_t bits[1][kWords];
    rules::visible_windows<kTileKeys>(mask, bounds, first_key, at, row, bits);
    const cuda::PositionParams& positions = p.features.positions;
    if (positions.is_set()) {
      int32_t position[kWords];
      cuda::read_positions(positions, batch, first_key, at, position);
      cuda::hide_by_positions(cuda::seen_by_lane(positions, batch, row, p.seqlen_q), position, bits[0]);
    }
#pragma unroll
    for (int n = 0; n < kWords; ++n) word_[n] = bits[0][n];
  }

  __device__ __forceinline__ void by_tile(const BackwardParams& p, int64_t offset, int32_t row, int32_t first_key,
                                          const int32_t (&at)[kWords]) {
    const cuda::BitTile tile = cuda::find_tile(p.bits, offset, row / 64, first_key / cuda::BitTiles::kKeys);
#pragma unroll
    for (int n = 0; n < kWords; ++n) {
      const uint2 rows = tile.rows(first_key % cuda::BitTiles::kKeys + at[n]);
      word_[n] = (row % 64 < 32 ? rows.x : rows.y) >> row % 32;
    }
  }

  __device__ __forceinline__ void by_matrix(const BackwardParams& p, int64_t offset, int32_t row, int32_t first_key,
                                            const int32_t (&at)[kWords]) {
    const int32_t rows = min(kRows, p.seqlen_q - row);
#pragma unroll
    for (int n = 0; n < kWords; ++n) {
      const uint8_t* visible =
          p.dense.visible + offset + row * p.dense.row_stride + (first_key + at[n]) * p.dense.key_stride;
      word_[n] = 0;
#pragma unroll 4
      for (int r = 0; r < kRows; ++r, visible += p.dense.row_stride) {
        if (r < rows && *visible) word_[n] |= 1u << r;
      }
    }
  }

  uint32_t word_[kWords];  ///< bit r: row r sees the lane's key
};

}  // namespace flashmask::sm80::bwd
