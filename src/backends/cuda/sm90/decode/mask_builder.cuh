// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/sm90/decode/arrivals.cuh"
#include "backends/cuda/sm90/decode/traits.cuh"

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
  static constexpr int kLaneKeys = cuda::kBlockKeys / 32, kLaneRows = cuda::kPackedRows / 32;

  __device__ __forceinline__ void run_work(const Work& work) {
    const SequenceView sequence = p_.sequence_of(work.tile);
    load_rows(sequence, work.tile);
    for (int32_t n = 0; n < work.tiles; ++n) {
      const uint32_t at = tiles_.stage();
      ptx::wait(shared_.tile_full[at], tiles_.phase());
      const KeyTile tile = shared_.tiles[at];
      arrive_warp(shared_.tile_empty[at]);
      tiles_.advance();
      if (tile.is_masked()) build(sequence, work, tile.first_key());
    }
  }

  /// Loads the facts that rows are compared by: positions, and bits among the tail's keys.
  __device__ __forceinline__ void load_rows(const SequenceView& sequence, const cuda::RowTile& tile) {
    const bool has_positions = sequence.has_positions();
#pragma unroll
    for (int n = 0; n < kLaneRows; ++n) {
      const int64_t i = ptx::lane() + 32 * n, row = sequence.first_row() + tile.first_row + i;
      if (i >= tile.row_count || row < 0) continue;
      position_[n] = has_positions ? sequence.row_position(row) : row;
#pragma unroll
      for (int word = 0; word < kTailWords; ++word) {
        const bool has_word = row >= sequence.tail_begin() && 32 * word < p_.call.tail_rows;
        tail_[n][word] = has_word ? p_.call.tail.at(tile.request, row - sequence.tail_begin(), word) : 0;
      }
    }
  }

  /// A lane's keys are those that its bit of each word stands for.
  struct Keys {
    int64_t key[kLaneKeys], position[kLaneKeys];
    HiddenIntervals hidden[kLaneKeys];
  };
  __device__ __forceinline__ void load_keys(const SequenceView& sequence, int32_t head, int32_t first,
                                            Keys& keys) const {
#pragma unroll
    for (int c = 0; c < kLaneKeys; ++c) {
      keys.key[c] = first + static_cast<int64_t>(cuda::mask_key(ptx::lane(), c));
      keys.position[c] = keys.key[c];
      if (keys.key[c] >= sequence.keys()) continue;
      if (!p_.call.bounds.defined() && !sequence.has_positions()) continue;
      const KeyPlace place = sequence.place(keys.key[c]);
      keys.hidden[c] = sequence.hidden(keys.key[c], place, head);
      if (sequence.has_positions()) keys.position[c] = sequence.key_position(keys.key[c], place);
    }
  }

  __device__ __forceinline__ void build(const SequenceView& sequence, const Work& work, int32_t first) {
    Keys keys;
    load_keys(sequence, work.kv_head, first, keys);
    const uint32_t at = masks_.stage();
    ptx::wait(shared_.mask_empty[at], masks_.phase() ^ 1);
    TileMask& mask = shared_.masks[at];
    if (p_.needs_positions()) {
#pragma unroll
      for (int c = 0; c < kLaneKeys; ++c)
        mask.positions[cuda::mask_key(ptx::lane(), c)] = static_cast<int32_t>(keys.position[c]);
    }
#pragma unroll 1
    for (int32_t i = 0; i < work.tile.row_count; ++i) build_row(sequence, work, keys, i, mask);
    delay<Role::kMask>();
    ptx::arrive(shared_.mask_full[at]);
    masks_.advance();
  }

  /// Bits of row i, whose facts lane i % 32 has.
  __device__ __forceinline__ void build_row(const SequenceView& sequence, const Work& work, const Keys& keys, int32_t i,
                                            TileMask& mask) const {
    static_assert(kLaneRows == 2);
    const bool second = i >= 32;
    const int64_t row = sequence.first_row() + work.tile.first_row + i;
    const bool in_blocks = row >= 0 && sequence.in_blocks(row, keys.key[0], work.kv_head);  // they share a block
    const int64_t position = __shfl_sync(0xffffffff, second ? position_[1] : position_[0], i % 32);
    uint32_t words[kTailWords];
#pragma unroll
    for (int w = 0; w < kTailWords; ++w) words[w] = __shfl_sync(0xffffffff, second ? tail_[1][w] : tail_[0][w], i % 32);
    const auto tail_bit = [&words](int64_t, int64_t key) {
      const auto u = static_cast<uint32_t>(key);
      uint32_t word = 0;
#pragma unroll
      for (int w = 0; w < kTailWords; ++w) word = u / 32 == w ? words[w] : word;
      return (word >> u % 32 & 1) != 0;
    };
#pragma unroll
    for (int c = 0; c < kLaneKeys; ++c) {
      const bool sees = in_blocks && keys.key[c] < sequence.keys() &&
                        sequence.in_band(row, keys.key[c], position, keys.position[c], tail_bit) &&
                        !keys.hidden[c].hides(row);
      const uint32_t bits = __ballot_sync(0xffffffff, sees);
      if (ptx::is_leader()) mask.bits.row[i][c] = bits;
    }
  }

  static constexpr int kTailWords = 4;

  const DecodeParams& p_;
  Shared& shared_;
  ptx::RingPosition<Traits::kWorks> works_;
  ptx::RingPosition<Traits::kTiles> tiles_;
  ptx::RingPosition<Traits::kMasks> masks_;
  int64_t position_[kLaneRows] = {};
  uint32_t tail_[kLaneRows][kTailWords] = {};
};

}  // namespace flashmask::sm90
