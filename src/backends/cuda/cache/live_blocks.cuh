// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/cache/cached_params.h"

namespace flashmask::cuda {

/// The live blocks of a unit, in ascending order.
class LiveBlocks {
 public:
  /// The tile's, from the skipped-th on.
  __device__ __forceinline__ void begin(const CachedParams& p, const RowTile& tile, int32_t head, int32_t skipped) {
    end_ = (tile.keys + kBlockKeys - 1) / kBlockKeys;
    if (p.plan.has_classes) {
      next_ = tile.first_block;
      stop_ = p.plan.split_end(next_, end_);
      list_ = (tile.list + (p.plan.mask_heads == 1 ? 0 : head)) * int64_t{p.plan.words};
      word_ = next_ / kBlocksOfWord - 1;
      live_ = 0;
      skipped_ = skipped;
    } else {
      next_ = tile.first_block + skipped;
      find_unmasked(p, tile);
    }
  }

  /// Begins with the word of a forest's share.
  __device__ __forceinline__ void begin_share(const CachedParams& p, const Share& share) {
    if (!p.plan.is_forest()) return;
    word_ = share.first_word - 1;
    skipped_ -= share.passed;
  }

  struct Block {
    int32_t index;
    bool masked;
  };
  /// kPasses: steps over many words at once, which takes registers.
  template <bool kPasses = true>
  __device__ __forceinline__ Block next(const CachedParams& p) {
    if (!p.plan.has_classes) {
      const int32_t block = next_++;
      return {block, block < unmasked_begin_ || block >= unmasked_end_};
    }
    const int32_t words = min(p.plan.words, (stop_ + kBlocksOfWord - 1) / kBlocksOfWord);
    while (live_ == 0 && ++word_ < words) {
      load_word(p);
      if (kPasses && live_ == 0) pass_words(p, words);
    }
    if (live_ != 0) {
      const int bit = __ffs(live_) - 1;
      live_ &= live_ - 1;
      return {word_ * kBlocksOfWord + bit, !(full_ >> bit & 1)};
    }
    // Blocks that a plan has no room for, and past the last key one that stands for none.
    word_ = words;
    const int32_t block = max(p.plan.words * kBlocksOfWord, next_) + skipped_++;
    return {block < stop_ ? block : end_, true};
  }

  /// How many of the next blocks are seen whole by all rows, as far as that is known without class bits.
  __device__ __forceinline__ int32_t unmasked_ahead(const CachedParams& p) const {
    return p.plan.has_classes || next_ < unmasked_begin_ ? 0 : max(unmasked_end_ - next_, 0);
  }
  /// Passes over as many of unmasked_ahead's blocks.
  __device__ __forceinline__ void pass(int32_t blocks) { next_ += blocks; }

 private:
  /// Finds the blocks of which the band lets all rows see all keys.
  __device__ __forceinline__ void find_unmasked(const CachedParams& p, const RowTile& tile) {
    unmasked_begin_ = unmasked_end_ = 0;
    const int64_t row = int64_t{tile.keys} - tile.rows_count + tile.first_row, last_row = row + tile.row_count - 1;
    if (row < 0) return;
    const int64_t tail = tile.keys - tile.tail, keys = last_row >= tail ? tail : tile.keys;
    const int64_t first_key = max(last_row + p.call.diagonal_lo, int64_t{0}),
                  end_key = max(min(row + p.call.diagonal_hi + 1, keys), int64_t{0});
    unmasked_begin_ = static_cast<int32_t>(min((first_key + kBlockKeys - 1) / kBlockKeys, int64_t{INT32_MAX}));
    unmasked_end_ = static_cast<int32_t>(end_key / kBlockKeys);
  }
  /// Loads a word of class bits, without the live blocks that are to be skipped.
  __device__ __forceinline__ void load_word(const CachedParams& p) {
    live_ = __ldcg(p.plan.live_bits + list_ + word_) &
            blocks_between(next_ - word_ * kBlocksOfWord, stop_ - word_ * kBlocksOfWord);
    full_ = __ldcg(p.plan.full_bits + list_ + word_);
    const int32_t count = __popc(live_);
    if (skipped_ >= count) {
      skipped_ -= count;
      live_ = 0;
    }
    for (; live_ != 0 && skipped_ > 0; --skipped_) live_ &= live_ - 1;
  }

  /// Passes over whole words without a live block, or whose live blocks are all to be skipped, many at a time: each
  /// waits for memory.
  __device__ __forceinline__ void pass_words(const CachedParams& p, int32_t words) {
    constexpr int kAtOnce = 8;
    while (word_ + kAtOnce < words && (word_ + 1 + kAtOnce) * kBlocksOfWord <= stop_) {
      int32_t count = 0;
#pragma unroll
      for (int i = 1; i <= kAtOnce; ++i) count += __popc(__ldcg(p.plan.live_bits + list_ + word_ + i));
      if (count > skipped_) return;
      skipped_ -= count;
      word_ += kAtOnce;
    }
  }

  int32_t end_;                            ///< blocks that have keys
  int32_t next_;                           ///< with class bits the first that may be live
  int32_t unmasked_begin_, unmasked_end_;  ///< without class bits
  int32_t stop_, word_, skipped_;          ///< with them; stop_: the end of those that may be live
  int64_t list_;
  uint32_t live_, full_;
};

}  // namespace flashmask::cuda
