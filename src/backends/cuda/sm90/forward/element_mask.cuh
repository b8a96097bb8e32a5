// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/ptx/tensor_core.cuh"
#include "mask/rules.h"

namespace flashmask::sm90 {

/// The elements of a 16 x 128 slab of scores as a warp's accumulators hold them: lane (g, c) = (lane / 4,
/// lane % 4) has rows g and g + 8 of columns 8j + 2c + e, j = 0 .. 15, e = 0, 1.
struct Slab {
  static constexpr int kRows = 16;
  __device__ __forceinline__ static int row_in_eight() { return static_cast<int>(threadIdx.x % 32) / 4; }
  __device__ __forceinline__ static int column_pair() { return static_cast<int>(threadIdx.x % 4); }
};

/// Which of a lane's 64 scores are visible: bit 2j + e of word `half` is row g + 8 half, column 8j + 2c + e.
struct SlabBits {
  uint32_t row[2];

  __device__ __forceinline__ void hide(float (&s)[64]) const {
#pragma unroll
    for (int n = 0; n < 64; ++n) {
      // In the order of the bits, so that several at a time become predicates.
      const int half = n / 32, bit = n % 32;
      ptx::hide_unless(row[half] & 1u << bit, s[bit / 2 * 4 + 2 * half + bit % 2]);
    }
  }
};

/// The visible elements of some rows x 128 keys: word c of a row is what the lanes (g, c) need of it.
template <int kRows>
struct alignas(16) MaskBits {
  uint32_t row[kRows][4];

  /// Of the calling lane in the slab that begins at this row.
  __device__ __forceinline__ SlabBits slab(int first_row) const {
    const int row_of_lane = first_row + Slab::row_in_eight(), c = Slab::column_pair();
    return {{row[row_of_lane][c], row[row_of_lane + 8][c]}};
  }
};

/// The key whose bit is number `bit` of word c.
__device__ __forceinline__ constexpr uint32_t mask_key(uint32_t bit, uint32_t c) {
  return bit / 2 * 8 + bit % 2 + 2 * c;
}

/// Word c with the bits of the keys before `key`, 0 <= key <= 128.
__device__ __forceinline__ uint32_t mask_word_before(int32_t key, int32_t c) {
  return rules::low_bits<uint32_t>(key / 8 * 2 + min(max(key % 8 - 2 * c, 0), 2));
}

}  // namespace flashmask::sm90
