// SPDX-License-Identifier: Apache-2.0
#pragma once

// How the kernels over caches divide their work, which a plan's kernels write and the attention kernels read.
//
// A unit of work is a row tile under one key head: up to 64 packed rows of a request (row i of the call's and head g of
// the group, i * heads + g), or 128 in tall tiles, over the live blocks of 128 keys. Units in order of row tile and key
// head have all live blocks in a row, and shares are equal stretches of it, as many as the device has places for CTAs.
// So a unit lies in one share, which then has its result, or in several in ascending order, whose partial results are
// merged.
//
// With batch_invariant a unit has the blocks of one split of the sequence, and shares have whole units: a row tile is
// listed once for each split in which it has live blocks. The results of a sequence of several splits are folded.
//
// Units of tall tiles are dealt whole where they are many or alike, and always with batch_invariant, whose splits they
// fold one into another: CTAs that begin units at about the same time read the same keys, and find them in L2.
//
// A forest's rows are in a row tile of each of three sizes. A block of keys is live in those of the sizes that cost
// least: keys that many requests see are read for many rows at once, those of one request for its own rows. A row's
// results, of up to three units, are merged by a kernel behind.

#include <cstdint>

#include "call/quotient.h"
#include "mask/rules.h"

namespace flashmask::cuda {

inline constexpr int kPackedRows = 64, kBlockKeys = 128;
/// Packed rows of a tall tile, by two warpgroups.
inline constexpr int kTallPackedRows = 2 * kPackedRows;
/// Shares that a unit should lie in at most: merging takes longer than reading a few more blocks.
inline constexpr int kMostParts = 16;
/// Words of class bits come by warps: 32 of 32 blocks each.
inline constexpr int kBlocksOfWord = 32;
/// Sizes of a forest's row tiles, and packed rows of those between the tallest and a request's.
inline constexpr int kTileLevels = 3, kMiddlePackedRows = 32;

/// Up to WorkPlan::packed_rows packed rows of one request.
struct RowTile {
  int64_t blocks_before;  ///< live blocks of all units of the row tiles before
  int32_t request;
  int32_t rows_begin, rows_count;   ///< SequenceSizes::rows
  int32_t first_entry, keys, tail;  ///< SequenceSizes
  int32_t first_row, row_count;     ///< rows of the request
  int32_t first_head, head_count;   ///< heads of the group
  int32_t first_block;              ///< the first that may be live; without class bits it is, as those behind it are
  int32_t live_blocks;              ///< each unit's; with class bits by key head the first one's
  int32_t list;                     ///< its class bits, of the first key head
  int32_t live_list;                ///< WorkPlan::live, likewise
  /// With batch_invariant: number of a unit's result, and how many are folded. In a forest: packed rows of all results
  /// before the tile's, and of each of these.
  int32_t part, parts;
};
static_assert(sizeof(RowTile) == 72);

/// The beginning of a share.
struct Share {
  RowTile tile;
  int32_t tile_index;
  int32_t kv_head;
  int32_t skipped;             ///< live blocks of the unit that are an earlier share's
  int32_t blocks;              ///< the share's; 0: it has no work
  int64_t all_blocks;          ///< the call's
  int32_t shares;              ///< that have work
  int32_t dealt;               ///< row tiles whose units are dealt whole to CTAs; 0: shares have the work
  int32_t first_word, passed;  ///< in a forest the class bits' word of the first block, and the skipped ones before it
};
static_assert(sizeof(Share) == 112);

/// A unit's part in a share: `tiles` live key blocks, or kEnd.
struct UnitPart {
  static constexpr int32_t kEnd = -1, kMergedLater = -1;
  int32_t tiles;
  int32_t kv_head;
  RowTile tile;
  int32_t parts;    ///< results that are merged; 0: this one is final; kMergedLater: by a kernel behind, in a forest
  int32_t counter;  ///< WorkPlan::arrived counts them here; without batch_invariant the unit's first share
  int32_t partial;  ///< the place of the result if it is not final; in a forest its first packed row among all
  int32_t unused;

#if defined(__CUDACC__)
  __device__ __forceinline__ bool is_final() const { return parts == 0; }
  /// True if the last CTA to arrive merges the results.
  __device__ __forceinline__ bool is_merged_here() const { return parts > 0; }
  /// Packed rows of the tile.
  __device__ __forceinline__ int32_t count() const { return tile.row_count * tile.head_count; }
#endif
};

/// The first of all `blocks` that is share `n`'s, of `shares`.
FLASHMASK_RULE int64_t first_block_of(int64_t n, int64_t blocks, int64_t shares) {
  return quotient(n * blocks, shares);
}
/// The share that a block is in.
FLASHMASK_RULE int64_t share_of(int64_t block, int64_t blocks, int64_t shares) {
  return quotient((block + 1) * shares - 1, blocks);
}

/// A size of a forest's row tiles.
struct TileLevel {
  int32_t rows, packed_rows;  ///< a tile's
  int32_t first_slot, slots;
  int32_t first_result;  ///< packed rows of the results of larger tiles
};

/// The results of a unit of a forest: packed rows of all results before its first, and how many there are.
struct UnitResults {
  int32_t first_row, count;
};

/// The first packed row, among those of all results, of a unit's result in share n of a forest: places ascend with
/// units as with shares, so none has two.
FLASHMASK_RULE int32_t result_row(const RowTile& tile, int32_t kv_head, int32_t n) {
  return tile.part + (kv_head + n) * tile.parts;
}

/// The parts of a plan in device memory.
struct WorkPlan {
  Share* shares;         ///< [most_shares]
  uint32_t* arrived;     ///< [most_shares]: by the first share of a unit, how many of its partial results are there;
                         ///< with batch_invariant [tile slots, heads_kv]
  RowTile* tiles;        ///< [tile slots, splits], those with rows first
  int32_t* live;         ///< [tile slots, splits, heads of masks]: live blocks, with class bits
  uint32_t* live_bits;   ///< [tile slots, heads of masks, words]
  uint32_t* full_bits;   ///< likewise: blocks that need no masking
  UnitResults* results;  ///< in a forest [tile slots, heads_kv]
  float* partials;       ///< [2 * most_shares]: results of units that lie in several shares, see partial_floats; with
                         ///< batch_invariant, or in a forest, [splits, split_rows], see split_floats
  int32_t words;         ///< words of a list
  int32_t mask_heads;    ///< 1, or heads_kv where masks differ by head
  int32_t most_shares;
  int32_t least_blocks;  ///< a share's, as far as there are
  int32_t split_blocks;  ///< likewise, where a unit would lie in more than kMostParts shares
  int32_t tile_slots;
  int32_t rows_of_tile, head_parts;  ///< rows of a tile, and tiles of a row
  int32_t group, heads_kv;
  int32_t has_classes;            ///< blocks are live by class bits
  int32_t invariant_blocks;       ///< with batch_invariant blocks of a split, which shares have whole; else 0
  int32_t last_split;             ///< first block of the last split that is listed, which has all blocks behind it, too
  int32_t splits;                 ///< the most of a sequence; 1 without batch_invariant
  int32_t split_rows;             ///< the most packed rows of all tiles together; in a forest of all results
  int32_t packed_rows;            ///< the most that a tile has
  TileLevel levels[kTileLevels];  ///< a forest's, the largest first; otherwise without rows

  /// The end of the split that a block is in, likewise, where units have all splits.
  FLASHMASK_RULE int32_t own_split_end(int32_t block, int32_t blocks) const {
    const int32_t n = block / invariant_blocks + 1;
    return n < splits && n * invariant_blocks < blocks ? n * invariant_blocks : blocks;
  }
  FLASHMASK_RULE bool is_forest() const { return levels[0].rows > 0; }
  /// True if units have all splits of a sequence.
  FLASHMASK_RULE bool folds() const { return invariant_blocks > 0 && packed_rows > kPackedRows; }
  /// The end of the split that begins at a block, in a sequence of so many.
  FLASHMASK_RULE int32_t split_end(int32_t first, int32_t blocks) const {
    if (first >= last_split || blocks - first < invariant_blocks) return blocks;
    return first + invariant_blocks;
  }
};

/// The units that are dealt whole to a CTA, one of each round; every other round goes backwards, so that the units of a
/// CTA are together about as long as another's.
struct DealtUnits {
  int32_t units, ctas, own, round = 0, first = 0;
  FLASHMASK_RULE DealtUnits(int32_t all, int32_t ctas_of_call, int32_t cta)
      : units(all), ctas(ctas_of_call), own(cta) {}
  FLASHMASK_RULE bool is_left() const { return first < units; }
  FLASHMASK_RULE int32_t unit() const { return first + (round % 2 == 0 ? own : ctas - 1 - own); }
  FLASHMASK_RULE bool has_unit() const { return unit() < units; }
  FLASHMASK_RULE void advance() { ++round, first += ctas; }
};
/// The row tile of a unit that is dealt: the list backwards, since with a causal mask a request's last is its longest.
FLASHMASK_RULE int32_t dealt_tile(int32_t tiles, int32_t unit, int32_t heads_kv) { return tiles - 1 - unit / heads_kv; }

/// The bits of a word of blocks from `begin` on, before `end`.
FLASHMASK_RULE uint32_t blocks_between(int32_t begin, int32_t end) {
  const uint32_t from = begin <= 0 ? ~0u : begin < kBlocksOfWord ? ~0u << begin : 0;
  return end >= kBlocksOfWord ? from : end > 0 ? from & ~(~0u << end) : 0;
}

/// Floats of a tile's partial result: each row's sum of weighted values, its largest score (log2) and its weights' sum.
constexpr int partial_floats(int packed_rows, int head_dim_v) { return packed_rows * (head_dim_v + 2); }
/// Floats of the results of splits, by split and packed row of the call: all sums of weighted values, then for each row
/// the largest score (log2) and the weights' sum.
constexpr int split_floats(int head_dim_v) { return head_dim_v + 2; }

}  // namespace flashmask::cuda
