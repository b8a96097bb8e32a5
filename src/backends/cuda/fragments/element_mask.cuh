// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/fragments/fragments.cuh"
#include "backends/cuda/ptx/registers.cuh"
#include "mask/rules.h"

namespace flashmask::cuda {

/// Which scores of a lane are visible: bit 2j + e of word `half` is row g + 8 half, column 8j + 2c + e of its slab.
struct SlabBits {
  uint32_t row[2];

  /// Makes hidden scores -inf; `s` is a slab's fragment of at most 128 keys.
  template <int kScores>
  __device__ __forceinline__ void hide(float (&s)[kScores]) const {
    static_assert(kScores <= 64, "a lane's scores of a row have one word");
#pragma unroll
    for (int n = 0; n < kScores; ++n) {
      // In the order of the bits, so that the compiler turns several at a time into predicates.
      const int half = n / (kScores / 2), bit = n % (kScores / 2);
      ptx::hide_unless(row[half] & 1u << bit, s[bit / 2 * 4 + 2 * half + bit % 2]);
    }
  }
};

/// The visible elements of some rows x 128 keys: word c of a row is what lanes (g, c) need of it.
template <int kRows>
struct alignas(16) MaskBits {
  uint32_t row[kRows][4];

  /// The calling lane's bits of the slab that begins at this row.
  __device__ __forceinline__ SlabBits slab(int first_row) const {
    const int row_of_lane = first_row + Slab::row_in_eight(), c = Slab::column_pair();
    return {{row[row_of_lane][c], row[row_of_lane + 8][c]}};
  }
};

/// The key that bit number `bit` of word c stands for.
__device__ __forceinline__ constexpr uint32_t mask_key(uint32_t bit, uint32_t c) {
  return bit / 2 * 8 + bit % 2 + 2 * c;
}

/// Word c with the bits of the keys before `key`, 0 <= key <= 128.
__device__ __forceinline__ uint32_t mask_word_before(int32_t key, int32_t c) {
  return rules::low_bits<uint32_t>(key / 8 * 2 + min(max(key % 8 - 2 * c, 0), 2));
}

/// One stage of a bit transpose between lanes: exchanges bit kBit of the lane's number with that of the bits' numbers.
template <int kBit>
__device__ __forceinline__ void exchange_bit(uint32_t lane, uint32_t (&x)[4]) {
  constexpr uint32_t kLow[5] = {0x55555555, 0x33333333, 0x0F0F0F0F, 0x00FF00FF, 0x0000FFFF};
  const bool upper = lane >> kBit & 1;
  if constexpr (kBit >= 3) {
    const uint32_t selector = kBit == 4 ? (upper ? 0x3276 : 0x5410) : (upper ? 0x3715 : 0x6240);
#pragma unroll
    for (int c = 0; c < 4; ++c) x[c] = __byte_perm(x[c], __shfl_xor_sync(0xffffffff, x[c], 1 << kBit), selector);
  } else {
    const uint32_t keep = upper ? ~kLow[kBit] : kLow[kBit], left = upper ? 32 - (1 << kBit) : 1 << kBit;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const uint32_t other = __shfl_xor_sync(0xffffffff, x[c], 1 << kBit);
      x[c] = (x[c] & keep) | (__funnelshift_l(other, other, left) & ~keep);
    }
  }
}

/// Lane l holds a column's bits of 32 rows; afterwards row l's bits of 32 columns. Four such squares at a time.
__device__ __forceinline__ void transpose_between_lanes(uint32_t lane, uint32_t (&x)[4]) {
  exchange_bit<4>(lane, x);
  exchange_bit<3>(lane, x);
  exchange_bit<2>(lane, x);
  exchange_bit<1>(lane, x);
  exchange_bit<0>(lane, x);
}

/// The two vectors of an interval of a mask's columns: where the columns' hidden rows begin and end.
struct IntervalVectors {
  const rules::Columns& mask;
  const int32_t* begin;
  const int32_t* end;

  __device__ __forceinline__ IntervalVectors(const rules::Columns& columns, int interval)
      : mask(columns),
        begin(interval == 0 ? columns.lts : columns.uts),
        end(interval == 0 ? columns.lte : columns.ute) {}

  __device__ __forceinline__ bool is_set() const { return begin || end; }

  /// The bound of the column at element place() of the vectors. Calls place() only if there is a vector to read.
  template <typename Place>
  __device__ __forceinline__ int32_t begin_at(Place place) const {
    return begin ? begin[place()] : 0;
  }
  template <typename Place>
  __device__ __forceinline__ int32_t end_at(Place place) const {
    return end ? end[place()] : mask.seqlen_q;
  }
};

}  // namespace flashmask::cuda
