// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which of up to 64 keys some rows of a sequence see, as bits: what Sequence says of one row and key, for many at once.

#include <array>
#include <bit>
#include <cstdint>

#include "cache/sequence.h"

namespace flashmask {

/// Keys of a sequence from `first` on: where they lie.
struct KeyTile {
  static constexpr int64_t kKeys = 64;
  int64_t first = 0, count = 0;
  std::array<KeyPlace, kKeys> at;

  KeyTile() = default;
  KeyTile(const Sequence& sequence, int64_t first_key, int64_t end) : first(first_key) {
    count = std::min(kKeys, end - first_key);
    sequence.load_places(first, count, at.data());
  }
};

class VisibleKeys {
 public:
  VisibleKeys(const CachedProblem& p, const Sequence& sequence) : p_(p), s_(sequence) {}

  /// Sets bits[i] for rows first_row + i, i < count, under key head hk: bit n is the tile's n-th key. Returns all of
  /// them together. Rows below 0 see nothing.
  uint64_t load(const KeyTile& tile, int64_t hk, int64_t first_row, int64_t count, uint64_t* bits) const {
    uint64_t any = 0;
    for (int64_t i = 0; i < count; ++i)
      any |= bits[i] = first_row + i < 0 ? 0 : in_band(tile, first_row + i) & in_blocks(tile, first_row + i, hk);
    if (!any || !p_.mask.bounds.defined()) return any;
    for (int64_t n = 0; n < tile.count; ++n) {
      if (any >> n & 1)
        hide(s_.hidden(tile.first + n, tile.at[static_cast<std::size_t>(n)], hk), n, first_row, count, bits);
    }
    any = 0;
    for (int64_t i = 0; i < count; ++i) any |= bits[i];
    return any;
  }

 private:
  /// Bits [begin, end) of a word, wherever they lie.
  static uint64_t range(int64_t begin, int64_t end) {
    const int64_t from = std::clamp<int64_t>(begin, 0, 64), to = std::clamp<int64_t>(end, from, 64);
    const uint64_t low = to == 64 ? ~uint64_t{0} : (uint64_t{1} << to) - 1;
    return from == 64 ? 0 : low & ~uint64_t{0} << from;
  }

  uint64_t in_band(const KeyTile& tile, int64_t r) const {
    const uint64_t all = range(0, tile.count);
    if (s_.has_band_positions()) return all & by_position(tile, r);
    const uint64_t above = range(r + p_.diagonal_lo - tile.first, 64),
                   below = range(0, r + p_.diagonal_hi - tile.first + 1);
    if (r < s_.tail_begin() || tile.first + tile.count <= s_.tail_begin()) return all & above & below;
    const uint64_t tail = range(s_.tail_begin() - tile.first, 64);
    return all & above & ((below & ~tail) | (tail_bits(tile, r) & tail));
  }
  uint64_t in_blocks(const KeyTile& tile, int64_t r, int64_t hk) const {
    if (!p_.mask.block_mask.defined()) return ~uint64_t{0};
    uint64_t bits = 0;
    for (int64_t n = 0, next; n < tile.count; n = next) {
      const int64_t j = tile.first + n;
      next = n + Sequence::kBlockSize - j % Sequence::kBlockSize;
      if (s_.in_blocks(r, j, hk)) bits |= range(n, next);
    }
    return bits;
  }
  uint64_t by_position(const KeyTile& tile, int64_t r) const {
    const int64_t position = s_.row_position(r);
    uint64_t bits = 0;
    for (int64_t n = 0; n < tile.count; ++n) {
      const int64_t j = tile.first + n;
      bits |= uint64_t{s_.in_band(r, j, position, s_.key_position(j, tile.at[static_cast<std::size_t>(n)]))} << n;
    }
    return bits;
  }
  uint64_t tail_bits(const KeyTile& tile, int64_t r) const {
    uint64_t bits = 0;
    for (int64_t n = std::max(int64_t{0}, s_.tail_begin() - tile.first); n < tile.count; ++n)
      bits |= uint64_t{s_.tail_bit(r - s_.tail_begin(), tile.first + n - s_.tail_begin())} << n;
    return bits;
  }
  static void hide(const HiddenIntervals& hidden, int64_t n, int64_t first_row, int64_t count, uint64_t* bits) {
    for (int k = 0; k < 2; ++k) {
      const int64_t begin = std::max<int64_t>(hidden.begin[k] - first_row, 0),
                    end = std::min<int64_t>(hidden.end[k] - first_row, count);
      for (int64_t i = begin; i < end; ++i) bits[i] &= ~(uint64_t{1} << n);
    }
  }

  const CachedProblem& p_;
  const Sequence& s_;
};

}  // namespace flashmask
