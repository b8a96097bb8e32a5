// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which weights of a tensor core's fragments dropout keeps. Plain arithmetic, for tests on the host, too.

#include <cstdint>

#include "common/dropout.h"

#if defined(__CUDACC__)
#include "backends/cuda/ptx/registers.cuh"
#endif

namespace flashmask::cuda {

/// 2 * bits + 1 if the high half of `number` is at least `threshold`, which is not 0, else 2 * bits. As the carry of a
/// sum it is two instructions.
FLASHMASK_DROPOUT uint32_t push_if_kept(uint32_t bits, uint32_t number, uint32_t threshold) {
#if defined(__CUDA_ARCH__)
  return ptx::double_plus_carry(bits, number, -(threshold << 16));
#else
  return 2 * bits + (number >= threshold << 16);
#endif
}
/// Shifts a bit for each of the two elements that have a word of a draw into `bits`: 1 where it is kept. The even key's
/// is then bit 0, the odd key's bit 1.
FLASHMASK_DROPOUT uint32_t push_kept(uint32_t bits, uint32_t word, uint32_t threshold) {
  return push_if_kept(push_if_kept(bits, word, threshold), word << 16, threshold);
}

/// Which weights of a lane's fragment of a slab, 16 rows x at most 128 keys, are dropped: bit 2j + e of word `half` is
/// row g + 8 half, key 8j + 2c + e, with (g, c) = (lane / 4, lane % 4), as in SlabBits.
struct DroppedBits {
  uint32_t row[2];
};

// A slab lies in sixteens of the whole, see dropout::Origin: one of rows, and as many of keys as sixteens(n) numbers,
// or transposed the other way round.

/// Draws a slab of a batch entry and a query head.
template <int kKeys, typename Sixteens>
FLASHMASK_DROPOUT DroppedBits draw_slab(dropout::Key key, uint32_t threshold, uint32_t batch, uint32_t head,
                                        uint32_t row_sixteen, const Sixteens& sixteens, uint32_t lane) {
  static_assert(kKeys % 32 == 0 && kKeys <= 128, "a lane's bits of a row have one word");
  const uint32_t of_row = dropout::row_draw(row_sixteen, lane / 4), own_key = lane % 4 * 2;
  uint32_t kept[2] = {};
#if defined(__CUDA_ARCH__)  // The others do not know the pragma.
#pragma unroll 1
#endif
  for (int n = kKeys / 16 - 2; n >= 0; n -= 2) {
    // Two draws at a time, as each waits for its round before.
    const dropout::Words words[2] = {
        dropout::draw(key, batch, head, of_row, dropout::key_draw(sixteens(n), own_key)),
        dropout::draw(key, batch, head, of_row, dropout::key_draw(sixteens(n + 1), own_key))};
    for (int draw = 1; draw >= 0; --draw) {
      for (int half = 0; half < 2; ++half) {
        kept[half] = push_kept(kept[half], words[draw].word[2 * half + 1], threshold);
        kept[half] = push_kept(kept[half], words[draw].word[2 * half], threshold);
      }
    }
  }
  return {{~kept[0], ~kept[1]}};
}

/// Which weights of a lane's fragment of a transposed slab, 16 keys x kRows rows, are dropped: bit i % 32 of word i /
/// 32 is that of its value i, key g + 8 (i / 2 % 2), row 8 (i / 4) + 2c + i % 2.
template <int kRows>
struct DroppedOfKeys {
  static constexpr int kRowsOfWord = kRows < 64 ? kRows : 64, kWords = kRows / kRowsOfWord;
  static_assert(kRows % kRowsOfWord == 0 && kRowsOfWord % 16 == 0);
  uint32_t word[kWords];
};

// A draw has eight elements: rows r and r + 8 by keys n, n + 1, n + 8 and n + 9, with n even. Two lanes, l and l ^ 4,
// have four each: an even g has keys n and n + 8, an odd g the others. Each lane makes the draws of half of the rows
// 2c + {0, 1}, the lane of even keys the even ones, and gives the other lane the bits of its keys.

/// The bits of a lane's draws of kRows rows and 16 keys: bit 8n + 4y + 2x + z is that of row 16n + 8y + 2c + g % 2 and
/// key 8x + g - g % 2 + z of the slab.
template <int kRows, typename Sixteens>
FLASHMASK_DROPOUT uint32_t draw_lane(dropout::Key key, uint32_t threshold, uint32_t batch, uint32_t head,
                                     const Sixteens& sixteens, uint32_t key_sixteen, uint32_t lane) {
  static_assert(kRows % 32 == 0 && kRows <= 64, "they have one word");
  const uint32_t of_key = dropout::key_draw(key_sixteen, lane / 4), own_row = lane % 4 * 2 + lane / 4 % 2;
  uint32_t kept = 0;
#if defined(__CUDA_ARCH__)
#pragma unroll 1
#endif
  for (int n = kRows / 16 - 2; n >= 0; n -= 2) {
    const dropout::Words words[2] = {
        dropout::draw(key, batch, head, dropout::row_draw(sixteens(n), own_row), of_key),
        dropout::draw(key, batch, head, dropout::row_draw(sixteens(n + 1), own_row), of_key)};
    for (int draw = 1; draw >= 0; --draw) {
      for (int w = 3; w >= 0; --w) kept = push_kept(kept, words[draw].word[w], threshold);
    }
  }
  return ~kept;
}
/// A word of DroppedOfKeys, from the bits of a lane's draws and the bits of lane ^ 4's.
FLASHMASK_DROPOUT uint32_t join_dropped(uint32_t own, uint32_t neighbours, uint32_t lane) {
  constexpr uint32_t kOfEvenKeys = 0x55555555, kOfOddKeys = 0xaaaaaaaa;
  return lane / 4 % 2 == 0 ? (own & kOfEvenKeys) | (neighbours & kOfEvenKeys) << 1
                           : (own & kOfOddKeys) | (neighbours & kOfOddKeys) >> 1;
}

}  // namespace flashmask::cuda
