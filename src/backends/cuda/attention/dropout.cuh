// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which weights of a tensor core's fragments dropout keeps. Plain arithmetic, for tests on the host, too.

#include <cstdint>

#include "common/dropout.h"

namespace flashmask::cuda {

/// Shifts a bit for each of the two elements that have a word of a draw into `bits`: 1 where it is dropped. The even
/// key's is then bit 0, the odd key's bit 1. A difference of 16-bit numbers has its sign, a borrow, in bit 31.
FLASHMASK_DROPOUT uint32_t push_dropped(uint32_t bits, uint32_t word, uint32_t threshold) {
  bits = bits << 1 | ((word >> 16) - threshold) >> 31;
  return bits << 1 | ((word & 0xffff) - threshold) >> 31;
}

/// Which weights of a lane's fragment of a slab, 16 rows x at most 128 keys, are dropped: bit 2j + e of word `half` is
/// row g + 8 half, key 8j + 2c + e, with (g, c) = (lane / 4, lane % 4), as in SlabBits.
struct DroppedBits {
  uint32_t row[2];
};

/// Of the slab that begins at (first_row, first_key), multiples of 16, of a batch entry and a query head.
template <int kKeys>
FLASHMASK_DROPOUT DroppedBits dropped_of_slab(dropout::Key key, uint32_t threshold, uint32_t batch, uint32_t head,
                                              uint32_t first_row, uint32_t first_key, uint32_t lane) {
  static_assert(kKeys % 16 == 0 && kKeys <= 128, "a lane's bits of a row have one word");
  const uint32_t of_row = dropout::draw_of_row(first_row + lane / 4),
                 of_key = dropout::draw_of_key(first_key + lane % 4 * 2);
  DroppedBits dropped{};
#if defined(__CUDA_ARCH__)  // The others do not know the pragma.
#pragma unroll 1
#endif
  for (int n = kKeys / 16 - 1; n >= 0; --n) {
    const dropout::Words words = dropout::draw(key, batch, head, of_row, of_key + 4 * static_cast<uint32_t>(n));
    for (int half = 0; half < 2; ++half) {
      dropped.row[half] = push_dropped(dropped.row[half], words.word[2 * half + 1], threshold);
      dropped.row[half] = push_dropped(dropped.row[half], words.word[2 * half], threshold);
    }
  }
  return dropped;
}

}  // namespace flashmask::cuda
