// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which attention weights dropout sets to zero: a function of the state, the batch entry, the query head, the row and
// the key alone, written once for all backends. Plain integer arithmetic, which compiles as CUDA device code. A change
// here changes what a state means.

#include <cstdint>

#if defined(__CUDACC__)
#define FLASHMASK_DROPOUT __host__ __device__ inline
#else
#define FLASHMASK_DROPOUT inline
#endif

namespace flashmask::dropout {

struct Key {
  uint32_t low, high;
};

struct Words {
  uint32_t word[4];
};

/// Philox4x32-7 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
FLASHMASK_DROPOUT Words philox(Words counter, Key key) {
  for (int round = 0; round < 7; ++round) {
    const uint64_t even = uint64_t{0xD2511F53} * counter.word[0], odd = uint64_t{0xCD9E8D57} * counter.word[2];
    counter = {{static_cast<uint32_t>(odd >> 32) ^ counter.word[1] ^ key.low, static_cast<uint32_t>(odd),
                static_cast<uint32_t>(even >> 32) ^ counter.word[3] ^ key.high, static_cast<uint32_t>(even)}};
    key = {key.low + 0x9E3779B9, key.high + 0xBB67AE85};
  }
  return counter;
}

/// The key of a call's draws. Philox under the seed makes it of the offset, so that no sum of a seed and an offset
/// stands for another.
FLASHMASK_DROPOUT Key key_of(uint64_t seed, uint64_t offset) {
  const Words words = philox({{static_cast<uint32_t>(offset), static_cast<uint32_t>(offset >> 32), 0, 0}},
                             {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  return {words.word[0], words.word[1]};
}

/// One draw has 16 bits for each of eight elements: rows r and r + 8 by keys k, k + 1, k + 8 and k + 9, where r % 16 <
/// 8, k % 16 < 8 and k is even. In tensor cores' fragments of S one lane holds all eight, in fragments of S^T it holds
/// four and its neighbour the others. Returns the number of the draws that have a row, or a key, of a sixteen: rows
/// 16 n to 16 n + 15, or such keys, are the sixteen n.
FLASHMASK_DROPOUT uint32_t row_draw(uint32_t sixteen, uint32_t row) { return sixteen * 8 + row % 8; }
FLASHMASK_DROPOUT uint32_t key_draw(uint32_t sixteen, uint32_t key) { return sixteen * 4 + key % 8 / 2; }

/// Which sixteens of a sequence the rows, or the keys, of a call are, so that a part draws what the whole does.
struct Origin {
  const int32_t* sixteens = nullptr;  ///< [1 or batch, last + 1]; null: the call has the sequence from 0 on
  uint32_t batch_stride = 0, last = 0;

  /// The number of the call's n-th sixteen. Those past its end, which have no element, read the last one's.
  FLASHMASK_DROPOUT uint32_t of(uint32_t batch, uint32_t n) const {
    return sixteens ? static_cast<uint32_t>(sixteens[batch * batch_stride + (n < last ? n : last)]) : n;
  }
};

/// Places of a call's rows, keys and query heads in the whole that dropout numbers.
struct Origins {
  Origin q, k;
  uint32_t first_head = 0;

  FLASHMASK_DROPOUT uint32_t row_draw(uint32_t batch, uint32_t row) const {
    return dropout::row_draw(q.of(batch, row / 16), row);
  }
  FLASHMASK_DROPOUT uint32_t key_draw(uint32_t batch, uint32_t key) const {
    return dropout::key_draw(k.of(batch, key / 16), key);
  }
};

/// The draw numbered `of_row` and `of_key` in a batch entry and a query head, all numbers those of the whole.
FLASHMASK_DROPOUT Words draw(Key key, uint32_t batch, uint32_t head, uint32_t of_row, uint32_t of_key) {
  return philox({{of_key, of_row, head, batch}}, key);
}

/// Places an element's bits in its draw: the word, and its low half for even keys.
FLASHMASK_DROPOUT uint32_t word_of(uint32_t row, uint32_t key) { return row / 8 % 2 * 2 + key / 8 % 2; }
FLASHMASK_DROPOUT uint32_t bits_of(const Words& words, uint32_t row, uint32_t key) {
  return words.word[word_of(row, key)] >> (key % 2 * 16) & 0xffff;
}

/// p rounded to 16 bits, at most 65535 / 65536: an element is kept if its bits are at least this.
FLASHMASK_DROPOUT uint32_t threshold_of(double p) {
  const auto rounded = static_cast<uint32_t>(p * 65536 + 0.5);
  return rounded < 65535 ? rounded : 65535;
}
/// Factor of kept weights.
FLASHMASK_DROPOUT double scale_of(uint32_t threshold) { return 65536.0 / (65536 - threshold); }

}  // namespace flashmask::dropout
