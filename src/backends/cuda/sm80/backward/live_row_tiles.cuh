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

/// The live row tiles of a key tile under the query heads of a head group, one after the other. Each step reads the
/// plan anew, so that nothing of it stays in registers. The lanes of a warp walk together, and all warps find the same.
template <typename Traits>
class LiveRowTiles {
 public:
  __device__ __forceinline__ LiveRowTiles(const BackwardParams& p, uint32_t batch, uint32_t end_head, int32_t key_tile)
      : p_(p), batch_(batch), end_head_(end_head), key_tile_(key_tile) {}

  /// Goes on to the next one; false after the last.
  __device__ __forceinline__ bool next(RowTile& tile) const {
    constexpr int kParts = Traits::kTilesOfGranule;
    if (tile.index >= 0 && (tile.index + 1) % kParts != 0 && tile.index + 1 < p_.row_tiles) {
      ++tile.index;
      return true;
    }
    for (; tile.head < end_head_; ++tile.head, tile.index = -1) {
      if (find((tile.index + kParts) / kParts, tile)) return true;
    }
    return false;
  }

 private:
  /// The head's first live tile from `first`, in tiles of the plan, on.
  __device__ __forceinline__ bool find(int32_t first, RowTile& tile) const {
    constexpr int kGranules = Traits::kGranules, kParts = Traits::kTilesOfGranule;
    if (p_.dense.is_set) {
      tile.index = first * kParts;
      tile.partial = true;
      return tile.index < p_.row_tiles;
    }
    constexpr uint32_t kBits = (1u << kGranules) - 1;
    const int64_t column = static_cast<int64_t>(cuda::mask_index(p_.plan, batch_, tile.head)) * p_.key_blocks +
                           key_tile_ / Traits::kTilesOfBlock;
    const auto word_of = [&](const uint32_t* granules, int32_t word) {
      return cuda::granule_word(p_.plan, granules, column, p_.plan.words_per_key, word);
    };
    const int32_t granule = first * kGranules;
    for (int32_t word = granule / 32; word < p_.plan.words_per_key; word += 32) {
      const int32_t own = word + static_cast<int32_t>(threadIdx.x % 32);
      uint32_t bits = own < p_.plan.words_per_key ? word_of(p_.plan.key_live, own) : 0;
      if (own == granule / 32) bits &= ~0u << granule % 32;
      const uint32_t found = __ballot_sync(0xffffffff, bits != 0);
      if (found == 0) continue;
      const int lane = __ffs(found) - 1;
      const int bit = (__ffs(__shfl_sync(0xffffffff, bits, lane)) - 1) / kGranules * kGranules;
      tile.index = ((word + lane) * 32 + bit) / kGranules * kParts;
      // Keys past the last are hidden.
      tile.partial = (word_of(p_.plan.key_full, word + lane) >> bit & kBits) != kBits ||
                     (key_tile_ + 1) * Traits::kKeys > p_.seqlen_k;
      return true;
    }
    return false;
  }

  const BackwardParams& p_;
  uint32_t batch_, end_head_;
  int32_t key_tile_;
};

}  // namespace flashmask::sm80::bwd
