// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <type_traits>

#include "backends/cuda/cache/live_blocks.cuh"
#include "backends/cuda/cache/packed_rows.cuh"
#include "backends/cuda/cache/unit_walk.cuh"
#include "backends/cuda/fragments/float8_units.cuh"
#include "backends/cuda/fragments/fragments.cuh"
#include "backends/cuda/sm80/common/shared_tile.cuh"
#include "backends/cuda/sm80/decode/tile_config.h"

namespace flashmask::sm80 {

/// One configuration of the decode kernel: an element type, a row of kDecodeTiles, and a variant.
template <typename Element_, int kHeadDim, int kHeadDimV, int kKilobytes, cuda::Variant variant>
struct DecodeTraits {
  using Element = Element_;
  /// A cache of e4m3 has products in f16, which holds all of its numbers.
  static constexpr bool kFloat8 = variant.float8;
  using Product = std::conditional_t<kFloat8, __half, Element>;
  using Stored = std::conditional_t<kFloat8, uint8_t, Element>;
  using Columns = std::conditional_t<kFloat8, cuda::InterleavedColumns, cuda::NaturalColumns>;
  static constexpr DecodeTile kTile = find_tile(kDecodeTiles, kHeadDim, kHeadDimV, kKilobytes);
  static constexpr int kQkDim = kHeadDim, kVDim = kHeadDimV;
  static_assert(kQkDim % 64 == 0 && kVDim % 64 == 0, "a steps and pieces of e4m3 are of 32 columns");
  static constexpr int kRows = cuda::kPackedRows;
  static constexpr int kKeys = kFloat8 ? kTile.float8_keys : kTile.keys;
  static constexpr int kSlots = kFloat8 ? kTile.float8_slots : kTile.slots;
  static_assert(kKeys == cuda::kBlockKeys || 2 * kKeys == cuda::kBlockKeys);
  static_assert(kSlots >= 2 && (kSlots & (kSlots - 1)) == 0, "keys and values take slots by turns");
  static constexpr int kWarps = 4, kThreads = 32 * kWarps;
  static constexpr int kLoadedKeys = kKeys / kWarps;  ///< each warp loads so many of a step
  /// Bits of the keys that a warp loads.
  using KeyBits = std::conditional_t<kLoadedKeys == 32, uint32_t, uint16_t>;
  /// Steps that are being read or loaded, and one more, whose place in the cache is looked up.
  static constexpr int kSteps = kSlots < 4 ? 4 : kSlots;
  /// True if O and S leave enough registers for a warp's rows of Q.
  static constexpr bool kQInRegisters = kQkDim * kKeys <= 128 * 64;

  using QTile = SharedTile<Product, kRows, kQkDim>;
  /// Numbers of e4m3 lie two and two where one of 16 bits would.
  using KTile = SharedTile<Product, kKeys, kQkDim / (kFloat8 ? 2 : 1)>;
  using VTile = SharedTile<Product, kKeys, kVDim / (kFloat8 ? 2 : 1)>;
  static constexpr int kSlotBytes = KTile::kBytes > VTile::kBytes ? KTile::kBytes : VTile::kBytes;
  /// True if a step's products with keys run beside those of the step before with values. O of 256 columns leaves no
  /// registers for it, and rows of keys that lie otherwise cannot stand for values.
  static constexpr bool kOverlaps = kSlots >= 4 && kVDim < 256 && KTile::kBlockColumns == VTile::kBlockColumns;
  using Outputs = cuda::Accumulators<16, kVDim>;
};

/// A step's keys of a unit, as a warp loads and reads them.
struct alignas(16) KeyStep {
  int32_t first_key;
  bool is_masked;  ///< some rows may not see some keys
  bool is_last;    ///< no other follows in the unit's part
  bool is_end;     ///< no step at all: there are no more
  int32_t keys;    ///< the request's
  int32_t request, kv_head;
  const int32_t* table;  ///< the request's; null: keys are contiguous
};

/// The units of a CTA's shares, in order. A single thread walks.
class ShareWalk {
 public:
  __device__ __forceinline__ void begin() {
    share_ = static_cast<int32_t>(blockIdx.x) - static_cast<int32_t>(gridDim.x);
    left_ = 0;
  }
  /// Goes on to the share's next unit, or to that of the next share that has work.
  __device__ __forceinline__ bool next(const cuda::CachedParams& p) {
    skipped_ = 0;
    if (left_ > 0) {
      units_.next(p.plan);
    } else {
      do {
        share_ += static_cast<int32_t>(gridDim.x);
        if (share_ >= p.plan.most_shares) return false;
        left_ = p.plan.shares[share_].blocks;
      } while (left_ == 0);
      units_.begin(p.plan, p.plan.shares[share_]);
      skipped_ = p.plan.shares[share_].skipped;
    }
    blocks_ = min(units_.live_blocks(p.plan) - skipped_, left_);
    left_ -= blocks_;
    return true;
  }

  __device__ __forceinline__ const cuda::RowTile& tile() const { return units_.tile(); }
  __device__ __forceinline__ int32_t head() const { return units_.head(); }
  /// Live blocks of the unit that are an earlier share's, and the share's.
  __device__ __forceinline__ int32_t skipped() const { return skipped_; }
  __device__ __forceinline__ int32_t blocks() const { return blocks_; }
  __device__ __forceinline__ cuda::UnitPart part(const cuda::CachedParams& p) const {
    return units_.part(p, share_, p.plan.shares[share_], blocks_);
  }

 private:
  int32_t share_, left_;  ///< left_: the share's blocks behind the unit
  int32_t skipped_, blocks_;
  cuda::UnitWalk units_;
};

/// The steps of a CTA's shares, in order, of kKeys keys: blocks or halves of them. A single lane walks.
template <int kKeys>
class StepWalk {
 public:
  __device__ __forceinline__ void begin() {
    units_.begin();
    unit_left_ = unmasked_steps_ = 0;
    has_half_ = false;
  }
  /// The step behind `before`.
  __device__ __forceinline__ KeyStep next(const cuda::CachedParams& p, const KeyStep& before) {
    if (unmasked_steps_ > 0) {
      --unmasked_steps_;
      KeyStep step = before;
      step.first_key += kKeys;
      return step;
    }
    if (has_half_) {
      first_key_ += kKeys;
      has_half_ = false;
    } else {
      if (unit_left_ == 0 && !next_unit(p)) return {.is_end = true};
      const auto block = blocks_.next(p);
      --unit_left_;
      first_key_ = block.index * cuda::kBlockKeys;
      is_masked_ = block.masked || p.needs_positions();
      has_half_ = kKeys < cuda::kBlockKeys && first_key_ + kKeys < units_.tile().keys;
      if (!is_masked_) pass_unmasked(p);
    }
    return {.first_key = first_key_,
            .is_masked = is_masked_,
            .is_last = unit_left_ == 0 && !has_half_,
            .is_end = false,
            .keys = units_.tile().keys,
            .request = units_.tile().request,
            .kv_head = units_.head(),
            .table = table_};
  }

 private:
  /// Counts the steps that follow on an unmasked block and differ from its first one by their keys alone. The unit's
  /// last block is not among them.
  __device__ __forceinline__ void pass_unmasked(const cuda::CachedParams& p) {
    const int32_t blocks = min(blocks_.unmasked_ahead(p), unit_left_ - 1);
    if (blocks <= 0) return;
    blocks_.pass(blocks);
    unit_left_ -= blocks;
    unmasked_steps_ = blocks * (cuda::kBlockKeys / kKeys) + has_half_;
    has_half_ = false;
  }
  __device__ __forceinline__ bool next_unit(const cuda::CachedParams& p) {
    if (!units_.next(p)) return false;
    unit_left_ = units_.blocks();
    blocks_.begin(p, units_.tile(), units_.head(), units_.skipped());
    find_table(p);
    return true;
  }
  __device__ __forceinline__ void find_table(const cuda::CachedParams& p) {
    const CachedView& call = p.call;
    table_ = nullptr;
    if (call.page_table.defined()) table_ = call.page_table.data + units_.tile().request * call.page_table.stride[0];
    if (call.page_indptr.defined())
      table_ = call.page_indices.data + units_.tile().first_entry * call.page_indices.stride[0];
  }

  int32_t unit_left_;       ///< blocks of the unit that are still to come
  int32_t unmasked_steps_;  ///< steps that come before them, see pass_unmasked
  ShareWalk units_;
  cuda::LiveBlocks blocks_;
  const int32_t* table_;
  int32_t first_key_;
  bool is_masked_, has_half_;  ///< has_half_: the block's second half comes next
};

template <typename Traits>
struct DecodeShared {
  struct Rows {
    alignas(128) unsigned char q[Traits::QTile::kBytes];
    /// By row of the tile, not by packed row, and by the warp that loads the keys; where steps overlap, of two by
    /// turns.
    typename Traits::KeyBits visible[Traits::kOverlaps + 1][Traits::kRows][Traits::kWarps];
    int32_t key_positions[Traits::kOverlaps + 1][Traits::kKeys];  ///< if ALiBi needs them
    float q_unit[Traits::kFloat8 ? Traits::kRows : 1];            ///< a power of two: what a row's products lack
    cuda::RowUnit o_unit[Traits::kFloat8 ? Traits::kWarps : 1][cuda::Slab::kRows];  ///< each warp's, for its O
  };
  /// One state of a warp's rows: what lane l has is in column l.
  using WarpState = float[Traits::kVDim / 2 + 4][32];
  union {
    Rows rows;
    WarpState states[2];  ///< after a unit's last step
  };
  alignas(128) unsigned char slots[Traits::kSlots][Traits::kSlotBytes];
  cuda::UnitPart work;
  ShareWalk units;  ///< thread 0's
  uint32_t is_last_part;
  /// Each warp's own, so that none waits for another; what lanes share costs no registers here.
  StepWalk<Traits::kKeys> walks[Traits::kWarps];
  KeyStep steps[Traits::kWarps][Traits::kSteps];
  /// The factors of keys and values of e4m3.
  struct Scales {
    float k[Traits::kKeys], v[Traits::kKeys];
  };
  Scales scales[Traits::kFloat8 ? Traits::kSteps : 1];
};

}  // namespace flashmask::sm80
