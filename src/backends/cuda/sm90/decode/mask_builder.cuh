// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/sm90/decode/arrivals.cuh"
#include "backends/cuda/sm90/decode/traits.cuh"
#include "mask/rules.h"

namespace flashmask::sm90 {

/// The mask warp: computes which keys of a tile each row of the call sees, for tiles that need it.
template <typename Traits>
class DecodeMaskBuilder {
 public:
  using Shared = DecodeShared<Traits>;
  __device__ __forceinline__ DecodeMaskBuilder(const DecodeParams& p, Shared& shared) : p_(p), shared_(shared) {}

  __device__ __forceinline__ void run() {
    while (true) {
      const uint32_t at = works_.stage();
      ptx::wait(shared_.work_full[at], works_.phase());
      const Work& work = shared_.works[at];
      if (work.tiles == Work::kEnd) return;
      run_work(work);
      arrive_warp(shared_.work_empty[at]);
      works_.advance();
    }
  }

 private:
  using Mask = TileMask<Traits::kRows>;
  static constexpr int kTailWords = 4;

  __device__ __forceinline__ void run_work(const Work& work) {
    for (int32_t n = 0; n < work.tiles; ++n) {
      const uint32_t at = tiles_.stage();
      ptx::wait(shared_.tile_full[at], tiles_.phase());
      const KeyTile tile = shared_.tiles[at];
      arrive_warp(shared_.tile_empty[at]);
      tiles_.advance();
      if (tile.is_masked()) build(work, tile.first_key());
    }
  }

  __device__ __forceinline__ void build(const Work& work, int32_t first) {
    const SequenceView sequence = p_.sequence_of(work.tile);
    const uint32_t at = masks_.stage();
    ptx::wait(shared_.mask_empty[at], masks_.phase() ^ 1);
    if (p_.needs_positions()) write_positions(sequence, first, shared_.masks[at]);
    if (p_.plan.has_classes) {
      by_columns(sequence, work, first, shared_.masks[at]);
    } else {
      by_band(sequence, work.tile, first, shared_.masks[at]);
    }
    delay<Role::kMask>();
    ptx::arrive(shared_.mask_full[at]);
    masks_.advance();
  }

  __device__ __forceinline__ static int32_t clamped(int64_t x, int32_t most) {
    return static_cast<int32_t>(min(max(x, int64_t{0}), int64_t{most}));
  }
  __device__ __forceinline__ static void store(const uint32_t (&words)[4], int32_t row, Mask& mask) {
    *reinterpret_cast<uint4*>(mask.bits.row[row]) = {words[0], words[1], words[2], words[3]};
  }

  /// From the band and the tail's bits: a lane computes one row of each 32.
  __device__ __forceinline__ void by_band(const SequenceView& sequence, const cuda::RowTile& tile, int32_t first,
                                          Mask& mask) const {
    const int32_t keys = clamped(sequence.keys() - first, cuda::kBlockKeys);
#pragma unroll 1
    for (auto i = static_cast<int32_t>(ptx::lane()); i < tile.row_count; i += 32) {
      const int64_t row = sequence.first_row() + tile.first_row + i, tail = sequence.tail_begin();
      const int32_t begin = clamped(row + p_.call.diagonal_lo - first, keys),
                    end = row < 0 ? 0 : clamped(row + p_.call.diagonal_hi + 1 - first, keys),
                    drafts = row >= max(tail, int64_t{0}) ? clamped(tail - first, keys) : keys;
      uint32_t words[4] = {};
      if (drafts < keys) find_drafts(tile.request, static_cast<int32_t>(row - tail), first - tail, words);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const uint32_t before = cuda::mask_word_before(drafts, c);
        words[c] = (cuda::mask_word_before(end, c) & before) | (words[c] & cuda::mask_word_before(keys, c) & ~before);
        words[c] &= ~cuda::mask_word_before(begin, c);
      }
      store(words, i, mask);
    }
  }

  /// Word c's byte for 32 keys, the lowest bit of the first: two neighbours of every eight (see mask_key).
  __device__ __forceinline__ static uint32_t mask_byte(uint32_t keys, int32_t c) {
    const uint32_t pairs = keys >> 2 * c & 0x03030303;
    return (pairs | pairs >> 6 | pairs >> 12 | pairs >> 18) & 0xff;
  }
  /// A row's bits of the tail in the order of a mask's words, for the 128 keys from the tail's key `from` on.
  __device__ __forceinline__ void find_drafts(int32_t request, int32_t row, int64_t from, uint32_t (&words)[4]) const {
    const int32_t first = static_cast<int32_t>(from >> 5), count = static_cast<int32_t>((p_.call.tail_rows + 31) / 32);
    const auto word = [&](int32_t w) { return w >= 0 && w < count ? p_.call.tail.at(request, row, w) : 0; };
    auto low = static_cast<uint32_t>(word(first));
#pragma unroll 1
    for (int n = 0; n < 4; ++n) {
      const auto high = static_cast<uint32_t>(word(first + n + 1));
      const uint32_t keys = __funnelshift_r(low, high, static_cast<uint32_t>(from) % 32);
#pragma unroll
      for (int c = 0; c < 4; ++c) words[c] |= mask_byte(keys, c) << 8 * n;
      low = high;
    }
  }

  // --- From vectors, positions, bits of the tail and blocks ------------------------------------------

  /// A lane's keys are those that its bit of each word stands for.
  static constexpr int kLaneKeys = cuda::kBlockKeys / 32;
  __device__ __forceinline__ static int32_t key_of(int32_t first, int c) {
    return first + static_cast<int32_t>(cuda::mask_key(ptx::opaque(ptx::lane()), c));  // registers are few
  }
  /// Bits of 32 rows, the lowest of the first, for each of the lane's keys.
  using RowBits = uint32_t[kLaneKeys];

  /// A lane computes all rows of four keys, then the lanes exchange rows and keys.
  __device__ __forceinline__ void by_columns(const SequenceView& sequence, const Work& work, int32_t first,
                                             Mask& mask) const {
#pragma unroll 1
    for (int32_t i = 0; i < work.tile.row_count; i += 32) {
      const int32_t row = static_cast<int32_t>(sequence.first_row()) + work.tile.first_row + i,
                    count = min(work.tile.row_count - i, 32);
      RowBits bits;
      if (sequence.has_band_positions() || is_in_tail(sequence, row + count, first)) {
        compare_rows(sequence, work.tile.request, first, row, count, bits);
      } else {
        find_in_band(first, row, bits);
      }
      leave_by_vectors(sequence, first, row, work.kv_head, bits);
      const uint32_t rows = visible_block_rows(sequence, row, count, first, work.kv_head) & from(row, 0);
#pragma unroll
      for (int c = 0; c < kLaneKeys; ++c) bits[c] &= key_of(first, c) < sequence.keys() ? rows : 0;
      cuda::transpose_between_lanes(ptx::lane(), bits);
      store(bits, i + static_cast<int32_t>(ptx::lane()), mask);
    }
  }

  /// Clears the bits of the rows from `row` on that the vectors of the lane's keys hide; of keys past the last any. The
  /// vectors of kAtOnce keys are under way at once.
  __device__ __forceinline__ void leave_by_vectors(const SequenceView& sequence, int32_t first, int32_t row,
                                                   int32_t head, RowBits& bits) const {
    const auto last = static_cast<int32_t>(sequence.keys()) - 1;
    if (!p_.call.bounds.defined() || last < 0) return;
    constexpr int kAtOnce = Traits::kConsumers == 1 ? kLaneKeys : kLaneKeys / 2;  // registers are few
#pragma unroll
    for (int c = 0; c < kLaneKeys; c += kAtOnce) {
      HiddenIntervals hidden[kAtOnce];
      load_vectors(sequence, head, [&](int n) { return min(key_of(first, c + n), last); }, hidden);
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) bits[c + n] &= rows_left(row, hidden[n]);
    }
  }
  template <int kCount, typename Key>
  __device__ __forceinline__ void load_vectors(const SequenceView& sequence, int32_t head, const Key& key,
                                               HiddenIntervals (&hidden)[kCount]) const {
    int32_t page[kCount] = {}, entry[kCount] = {};
    if (p_.call.keys_in_pages && p_.call.has_tables()) {
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
        page[n] = p_.key_page(key(n));
        entry[n] = sequence.table_entry(page[n]);
      }
    }
#pragma unroll
    for (int n = 0; n < kCount; ++n)
      hidden[n] = sequence.hidden(key(n), sequence.place(key(n), page[n], entry[n]), head);
  }
  /// The 32 rows from `row` on that some intervals do not hide.
  __device__ __forceinline__ static uint32_t rows_left(int32_t row, const HiddenIntervals& hidden) {
    return ~((before(row, hidden.end[0]) & from(row, hidden.begin[0])) |
             (before(row, hidden.end[1]) & from(row, hidden.begin[1])));
  }

  __device__ __forceinline__ static void write_positions(const SequenceView& sequence, int32_t first, Mask& mask) {
#pragma unroll
    for (int c = 0; c < kLaneKeys; ++c) mask.positions[key_of(0, c)] = position_of(sequence, key_of(first, c));
  }
  __device__ __forceinline__ static int32_t position_of(const SequenceView& sequence, int32_t key) {
    if (!sequence.has_positions() || key >= sequence.keys()) return key;
    return static_cast<int32_t>(sequence.key_position(key, sequence.place(key)));
  }
  /// Bits of the 32 rows from `first` on that come before a row, and of the others. In 32 bits, which `first` + 32
  /// fits.
  __device__ __forceinline__ static uint32_t before(int32_t first, int32_t row) {
    return rules::low_bits<uint32_t>(min(max(row, first), first + 32) - first);
  }
  __device__ __forceinline__ static uint32_t from(int32_t first, int32_t row) { return ~before(first, row); }

  /// Keys are below 2^30, so that a distance beyond hides, or leaves, all rows, and sums fit 32 bits.
  __device__ __forceinline__ void find_in_band(int32_t first, int32_t row, RowBits& bits) const {
    constexpr int64_t kFar = int64_t{1} << 30;
    const auto lo = static_cast<int32_t>(min(max(p_.call.diagonal_lo, 1 - kFar), kFar)),
               hi = static_cast<int32_t>(min(max(p_.call.diagonal_hi, -kFar), kFar));
#pragma unroll
    for (int c = 0; c < kLaneKeys; ++c) {
      const int32_t key = key_of(first, c);
      bits[c] = before(row, key - lo + 1) & from(row, key - hi);
    }
  }
  /// True if rows before `end` and keys of the tile that begins at `first` may be of the tail.
  __device__ __forceinline__ bool is_in_tail(const SequenceView& sequence, int32_t end, int32_t first) const {
    const int64_t tail = sequence.tail_begin();
    return end > tail && first + cuda::kBlockKeys > tail && tail < sequence.keys();
  }

  /// Likewise with positions and the tail's bits, row by row: lane i has the facts of row i.
  __device__ __forceinline__ void compare_rows(const SequenceView& sequence, int32_t request, int32_t first,
                                               int32_t row, int32_t count, RowBits& bits) const {
    const int32_t own = row + static_cast<int32_t>(ptx::lane());
    const bool is_there = own >= max(row, 0) && own < row + count;
    const int32_t position =
        is_there && sequence.has_positions() ? static_cast<int32_t>(sequence.row_position(own)) : own;
    uint32_t tail[kTailWords];
#pragma unroll
    for (int w = 0; w < kTailWords; ++w) {
      const bool has_word = is_there && own >= sequence.tail_begin() && 32 * w < p_.call.tail_rows;
      tail[w] = has_word ? p_.call.tail.at(request, own - sequence.tail_begin(), w) : 0;
    }
    int32_t positions[kLaneKeys];
#pragma unroll
    for (int c = 0; c < kLaneKeys; ++c) {
      positions[c] = position_of(sequence, key_of(first, c));
      bits[c] = 0;
    }
#pragma unroll 1
    for (int32_t i = 0; i < count; ++i) {
      const int32_t of_row = __shfl_sync(0xffffffff, position, i);
      uint32_t words[kTailWords];
#pragma unroll
      for (int w = 0; w < kTailWords; ++w) words[w] = __shfl_sync(0xffffffff, tail[w], i);
      const auto tail_bit = [&words](int64_t, int64_t key) {
        const auto u = static_cast<uint32_t>(key);
        uint32_t word = 0;
#pragma unroll
        for (int w = 0; w < kTailWords; ++w) word = u / 32 == w ? words[w] : word;
        return (word >> u % 32 & 1) != 0;
      };
#pragma unroll
      for (int c = 0; c < kLaneKeys; ++c) {
        const bool sees = sequence.in_band(row + i, key_of(first, c), of_row, positions[c], tail_bit);
        bits[c] |= static_cast<uint32_t>(sees) << i;
      }
    }
  }

  /// The rows whose blocks let them see the tile's keys: 32 rows lie in two blocks at most.
  __device__ __forceinline__ uint32_t visible_block_rows(const SequenceView& sequence, int32_t row, int32_t count,
                                                         int32_t first, int32_t head) const {
    if (!p_.call.block_mask.defined()) return ~0u;
    const int32_t begin = max(row, 0), end = (begin / cuda::kBlockKeys + 1) * cuda::kBlockKeys;
    const uint32_t of_first = before(row, end);
    uint32_t rows = sequence.in_blocks(begin, first, head) ? of_first : 0;
    if (row + count > end && sequence.in_blocks(end, first, head)) rows |= ~of_first;
    return rows;
  }

  const DecodeParams& p_;
  Shared& shared_;
  ptx::RingPosition<Traits::kWorks> works_;
  ptx::RingPosition<Traits::kTiles> tiles_;
  ptx::RingPosition<Traits::kMasks> masks_;
};

}  // namespace flashmask::sm90
