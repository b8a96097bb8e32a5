// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/device/plan_bits.cuh"
#include "backends/cuda/sm80/backward/params.h"
#include "mask/rules.h"

namespace flashmask::sm80::bwd {

/// A query head's row tile with elements visible in a key tile; `partial` if not all are.
struct RowTile {
  uint32_t head;
  int32_t index;  ///< -1: before the head's first
  bool partial;
};

/// The live row tiles of a key tile under the query heads of a head group, one after the other. It holds one word of
/// the plan's bits, for 2048 rows: reading it for each row tile would hold up all warps of a CTA at once. The lanes of
/// a warp walk together, and all warps find the same.
template <typename Traits>
class LiveRowTiles {
 public:
  __device__ __forceinline__ LiveRowTiles(const BackwardParams& p, uint32_t batch, uint32_t end_head, int32_t key_tile)
      : p_(p), batch_(batch), end_head_(end_head), key_tile_(key_tile) {}

  /// Goes on to the next one; false after the last.
  __device__ __forceinline__ bool next(RowTile& tile) {
    if (tile.index >= 0 && (tile.index + 1) % kParts != 0 && tile.index + 1 < p_.row_tiles) {
      ++tile.index;
      return true;
    }
    for (; tile.head < end_head_; ++tile.head, tile.index = -1) {
      if (p_.dense.is_set) {
        tile.index = (tile.index + kParts) / kParts * kParts;
        tile.partial = true;
        if (tile.index < p_.row_tiles) return true;
      } else if (live_ != 0 || read_word(tile)) {
        take(word_of(tile), tile);
        return true;
      }
    }
    return false;
  }

 private:
  static constexpr int kGranules = Traits::kGranules, kParts = Traits::kTilesOfGranule;

  __device__ __forceinline__ static int32_t word_of(const RowTile& tile) {
    return tile.index / kParts * kGranules / 32;
  }

  /// Holds the bits of the head's next word with a live tile, and leaves one of its tiles in `tile`; false if there is
  /// none.
  __device__ __forceinline__ bool read_word(RowTile& tile) {
    const int64_t column = static_cast<int64_t>(cuda::mask_index(p_.plan, batch_, tile.head)) * p_.key_blocks +
                           key_tile_ / Traits::kTilesOfBlock;
    const auto read = [&](const uint32_t* granules, int32_t word) {
      return cuda::granule_word(p_.plan, granules, column, p_.plan.words_per_key, word);
    };
    const int32_t first = tile.index < 0 ? 0 : word_of(tile) + 1;
    for (int32_t word = first; word < p_.plan.words_per_key; word += 32) {
      const int32_t own = word + static_cast<int32_t>(threadIdx.x % 32);
      const uint32_t bits = own < p_.plan.words_per_key ? read(p_.plan.key_live, own) : 0;
      const uint32_t found = __ballot_sync(0xffffffff, bits != 0);
      if (found == 0) continue;
      const int lane = __ffs(found) - 1;
      live_ = __shfl_sync(0xffffffff, bits, lane);
      full_ = read(p_.plan.key_full, word + lane);
      tile.index = (word + lane) * 32 / kGranules * kParts;
      return true;
    }
    return false;
  }

  /// Goes on to the first live tile of the bits, and takes it out of them.
  __device__ __forceinline__ void take(int32_t word, RowTile& tile) {
    constexpr uint32_t kBits = (1u << kGranules) - 1;
    const int bit = (__ffs(live_) - 1) / kGranules * kGranules;
    live_ &= ~(kBits << bit);
    tile.index = (word * 32 + bit) / kGranules * kParts;
    // Keys past the last are hidden.
    tile.partial = (full_ >> bit & kBits) != kBits || (key_tile_ + 1) * Traits::kKeys > p_.seqlen_k;
  }

  const BackwardParams& p_;
  uint32_t batch_, end_head_;
  int32_t key_tile_;
  uint32_t live_ = 0, full_ = 0;  ///< the word's granules: those that lie ahead, and all
};

}  // namespace flashmask::sm80::bwd
