// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/sm90/forward/params.h"
#include "mask/rules.h"

namespace flashmask::sm90 {

/// The elements of a 16 x 128 slab of scores as a warp's accumulators hold them: lane (g, c) = (lane / 4,
/// lane % 4) has rows g and g + 8 of columns 8j + 2c + e, j = 0 .. 15, e = 0, 1.
struct Slab {
  static constexpr int kRows = 16;
  int32_t row, key;  ///< of its first element
  __device__ __forceinline__ static int row_in_eight() { return static_cast<int>(threadIdx.x % 32) / 4; }
  __device__ __forceinline__ static int column_pair() { return static_cast<int>(threadIdx.x % 4); }
};

/// Which of a lane's 64 scores are visible. Bit 4 half + 2 (j % 2) + e of byte j / 2 % 4 of word j / 8 is row
/// g + 8 half, column 8j + 2c + e.
struct SlabBits {
  uint32_t word[2];

  __device__ __forceinline__ static constexpr int bit(int j, int e, int half) { return 8 * (j / 2 % 4) + 4 * half + 2 * (j % 2) + e; }

  __device__ __forceinline__ void hide(float (&s)[64]) const {
#pragma unroll
    for (int n = 0; n < 64; ++n) {
      // In the order of the bits, so that eight at a time become predicates.
      const int j = n / 8 * 2 + n / 2 % 2, half = n / 4 % 2, e = n % 2;
      if (!(word[n / 32] >> (n % 32) & 1)) s[4 * j + 2 * half + e] = -INFINITY;
    }
  }
};

/// Transposes the 8 x 8 bits of `low` (rows 0 to 3, a byte each) and `high` (rows 4 to 7).
__device__ __forceinline__ void transpose_bits(uint32_t& low, uint32_t& high) {
#pragma unroll
  for (int shift = 7; shift <= 14; shift += 7) {
    const uint32_t mask = shift == 7 ? 0x00AA00AAu : 0x0000CCCCu;
    uint32_t swap = (low ^ low >> shift) & mask;
    low ^= swap ^ swap << shift;
    swap = (high ^ high >> shift) & mask;
    high ^= swap ^ swap << shift;
  }
  const uint32_t nibbles = 0x0F0F0F0Fu, first = (low & nibbles) | (high & nibbles) << 4;
  high = (low >> 4 & nibbles) | (high & ~nibbles);
  low = first;
}

/// Lane (g, c) has a byte for each lane (d, c) of its column pair: byte d % 4 of `low` for d < 4, of `high` for the
/// others. Afterwards it has the bytes meant for it, in the order of their senders: a transpose in three exchanges.
__device__ __forceinline__ void exchange_bytes(uint32_t& low, uint32_t& high) {
  const int g = Slab::row_in_eight();
  const bool upper = g & 4, second = g & 2, odd = g & 1;
  uint32_t received = __shfl_xor_sync(0xffffffff, upper ? low : high, 16);
  const uint32_t from_low = upper ? received : low, from_high = upper ? high : received;
  uint32_t keep = __byte_perm(from_low, from_high, second ? 0x7632 : 0x5410);
  received = __shfl_xor_sync(0xffffffff, __byte_perm(from_low, from_high, second ? 0x5410 : 0x7632), 8);
  low = __byte_perm(keep, received, second ? 0x1054 : 0x5410);
  high = __byte_perm(keep, received, second ? 0x3276 : 0x7632);
  keep = __byte_perm(low, high, odd ? 0x7531 : 0x6420);
  received = __shfl_xor_sync(0xffffffff, __byte_perm(low, high, odd ? 0x6420 : 0x7531), 4);
  low = __byte_perm(keep, received, odd ? 0x1504 : 0x5140);
  high = __byte_perm(keep, received, odd ? 0x3726 : 0x7362);
}

/// Visibility by the mask's vectors, `offset` elements into them. Every lane works out four columns for all 16
/// rows, two at a time (four would spill), then the eight lanes that hold scores of the same columns exchange them.
__device__ __forceinline__ SlabBits visible_by_columns(const MaskColumns& mask, int64_t offset, int32_t seqlen_k, const Slab& slab) {
  rules::Columns columns = mask.first;
  if (columns.lts) columns.lts += offset;
  if (columns.lte) columns.lte += offset;
  if (columns.uts) columns.uts += offset;
  if (columns.ute) columns.ute += offset;
  const int32_t key = 16 * Slab::row_in_eight() + 2 * Slab::column_pair(), last = seqlen_k - 1 - slab.key;
  uint32_t pairs[2];
#pragma unroll 1
  for (int n = 0; n < 2; ++n) {
    const int32_t at[2] = {min(key + 8 * n, last), min(key + 8 * n + 1, last)};
    uint32_t bits[2];
    rules::visible_windows(columns, slab.key, at, slab.row, bits);
    pairs[0] = pairs[1];
    pairs[1] = __byte_perm(bits[0], bits[1], 0x5410);
  }
  if (last < 127) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (key + n % 2 + 8 * (n / 2) > last) pairs[n / 2] &= n % 2 ? 0x0000ffffu : 0xffff0000u;
    }
  }
  uint32_t low = __byte_perm(pairs[0], pairs[1], 0x6420), high = __byte_perm(pairs[0], pairs[1], 0x7531);
  transpose_bits(low, high);
  exchange_bytes(low, high);
  return {low, high};
}

/// Visibility by a dense mask, `offset` bytes into it.
__device__ __forceinline__ SlabBits visible_by_matrix(const DenseMask& dense, int64_t offset, int32_t seqlen_q, int32_t seqlen_k,
                                                      const Slab& slab) {
  SlabBits bits{};
#pragma unroll 1
  for (int n = 0; n < 32; ++n) {
    const int j = n % 8, e = n / 8 % 2, half = n / 16;
    const int32_t row = slab.row + Slab::row_in_eight() + 8 * half;
#pragma unroll
    for (int word = 0; word < 2; ++word) {
      const int32_t key = slab.key + 64 * word + 8 * j + 2 * Slab::column_pair() + e;
      const bool inside = row < seqlen_q && key < seqlen_k;
      const bool visible = inside && dense.visible[offset + row * dense.row_stride + key * dense.key_stride];
      bits.word[word] |= static_cast<uint32_t>(visible) << SlabBits::bit(j, e, half);
    }
  }
  return bits;
}

}  // namespace flashmask::sm90
