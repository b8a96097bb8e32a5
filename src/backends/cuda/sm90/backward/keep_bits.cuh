// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/ptx/registers.cuh"
#include "common/dropout.h"

namespace flashmask::sm90::bwd {

// Of scores, key-major, a lane (g, c) = (lane / 4, lane % 4) has keys g and g + 8 and rows 8j + 2c + e: see
// Accumulators. The eight elements of a draw are of two such keys, one even and one odd, and of rows 8 apart. So the
// lane of the even key makes the draws of e = 0, the lane of the odd one, four further on, those of e = 1, and each
// passes the bits of the other's keys on to it.

/// What dropout keeps of a draw's elements, for each of the two lanes: bit 2w is that of word w.
struct KeptOfDraw {
  uint32_t even, odd;
};
FLASHMASK_DROPOUT KeptOfDraw kept_of(const dropout::Words& words, uint32_t threshold) {
  threshold <<= 16;
  KeptOfDraw kept{};
  for (uint32_t w = 0; w < 4; ++w) {
    kept.even |= words.word[w] << 16 >= threshold ? 1u << 2 * w : 0;
    kept.odd |= words.word[w] >= threshold ? 1u << 2 * w : 0;
  }
  return kept;
}

/// Which of the draws of 16 rows, from row `row` on, and of the keys from `key` on, both multiples of 16, are a lane's.
FLASHMASK_DROPOUT uint32_t first_draw_of_row(uint32_t row, uint32_t lane) {
  return dropout::draw_of_row(row) + 2 * (lane % 4) + lane / 4 % 2;
}
FLASHMASK_DROPOUT uint32_t first_draw_of_key(uint32_t key, uint32_t lane) {
  return dropout::draw_of_key(key) + lane / 8;
}

/// What a lane keeps of its draws, and what it passes on to lane ^ 4; and both lanes' as bit 4j + 2h + e of its scores.
FLASHMASK_DROPOUT uint32_t own_half(KeptOfDraw kept, uint32_t lane) { return lane / 4 % 2 ? kept.odd : kept.even; }
FLASHMASK_DROPOUT uint32_t other_half(KeptOfDraw kept, uint32_t lane) { return lane / 4 % 2 ? kept.even : kept.odd; }
FLASHMASK_DROPOUT uint32_t join(uint32_t own, uint32_t of_neighbour, uint32_t lane) {
  return lane / 4 % 2 ? own << 1 | of_neighbour : own | of_neighbour << 1;
}

/// Which of a thread's scores of 64 keys x kRows rows dropout keeps: bit i % kOfWord of word i / kOfWord is that of score
/// i.
template <int kRows>
struct KeepBits {
  static constexpr int kRowsOfWord = kRows < 64 ? kRows : 64, kWords = kRows / kRowsOfWord;
  static constexpr int kScores = kRows / 2, kOfWord = kRowsOfWord / 2;
  uint32_t word[kWords];

#if defined(__CUDACC__)
  /// Of the warp's 16 keys, from `first_key` on, and the rows from `first_row` on.
  __device__ __forceinline__ void draw(dropout::Key key, uint32_t threshold, uint32_t batch, uint32_t head,
                                       uint32_t first_row, uint32_t first_key) {
    const uint32_t lane = ptx::lane();
    const uint32_t of_key = first_draw_of_key(first_key, lane);
#pragma unroll
    for (uint32_t i = 0; i < kWords; ++i) {
      const uint32_t of_row = first_draw_of_row(first_row + kRowsOfWord * i, lane);
      KeptOfDraw all{};
#pragma unroll
      for (uint32_t j = 0; j < kRowsOfWord / 16; ++j) {
        const KeptOfDraw kept = kept_of(dropout::draw(key, batch, head, of_row + 8 * j, of_key), threshold);
        all.even |= kept.even << 8 * j;
        all.odd |= kept.odd << 8 * j;
      }
      const uint32_t of_neighbour = __shfl_xor_sync(0xffffffff, other_half(all, lane), 4);
      word[i] = join(own_half(all, lane), of_neighbour, lane);
    }
  }

  /// Makes those of the scores' values 0 that are dropped.
  __device__ __forceinline__ void drop(float (&x)[kScores]) const {
#pragma unroll
    for (int i = 0; i < kScores; i += kOfWord) {
      // Opaque, as otherwise its bits, one by one, would be kept for the next call.
      const uint32_t bits = ptx::opaque(word[i / kOfWord]);
#pragma unroll
      for (int bit = 0; bit < kOfWord; ++bit) ptx::zero_unless(bits & 1u << bit, x[i + bit]);
    }
  }
#endif
};

/// In place of KeepBits where nothing is dropped.
struct NoKeepBits {};

}  // namespace flashmask::sm90::bwd
