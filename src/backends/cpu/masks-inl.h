// SPDX-License-Identifier: Apache-2.0

// Sources of element masks and live tiles, and the masks of a panel's lanes.

// Included by tile_kernels.cpp, once for each instruction set.
#if defined(FLASHMASK_BACKENDS_CPU_MASKS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FLASHMASK_BACKENDS_CPU_MASKS_INL_H_
#undef FLASHMASK_BACKENDS_CPU_MASKS_INL_H_
#else
#define FLASHMASK_BACKENDS_CPU_MASKS_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <bit>

#include "backends/cpu/element_mask.h"
#include "backends/cpu/simd-inl.h"
#include "call/problem.h"

HWY_BEFORE_NAMESPACE();
namespace flashmask::cpu::HWY_NAMESPACE {

/// Provides the element masks and live tiles of one (batch entry, query head). Tiles are the plan's, whatever says
/// which elements of a partial one are visible.
class MaskSource {
 public:
  MaskSource(const Problem& p, int64_t b, int64_t h) : p_(p), m_(p.mask_index(b, h)) {
    if (p.dense.defined()) {
      dense_ = dense_matrix(p, b, h);
    } else {
      columns_ = column_rows(p.mask, m_ / p.mask.heads(), m_ % p.mask.heads());
      positions_ = position_band(p.mask, m_ / p.mask.heads());
    }
  }

  /// Flattened: the mask's rules are made of loops over the keys, which are to be compiled for this instruction set.
  HWY_FLATTEN void load(int64_t r, int64_t c, ElementMask& mask) const {
    const int64_t row0 = r * kTileRows, key0 = c * kTileKeys;
    const int64_t keys = std::min(kTileKeys, p_.seqlen_k - key0);
    if (dense_) {
      const int64_t of_row = p_.dense.stride[2], of_key = p_.dense.stride[3];
      mask.load(dense_ + row0 * of_row + key0 * of_key, of_row, of_key, std::min(kTileRows, p_.seqlen_q - row0), keys);
    } else {
      mask.load(columns_, row0, key0, keys);
      if (positions_.q_pos) {
        mask.hide({positions_.lo, positions_.hi, positions_.q_pos + row0, positions_.k_pos + key0},
                  std::min(kTileRows, p_.seqlen_q - row0), keys);
      }
    }
  }

  /// Calls begin(key tile) for every key tile, ascending, that one of the row tiles [first, last) executes, and then
  /// visit(row tile, key tile, full) for each row tile that executes it.
  template <typename Begin, typename Visit>
  void for_each_key_tile(int64_t first, int64_t last, Begin&& begin, Visit&& visit) const {
    for (std::size_t w = 0; w < p_.plan.row_live(m_, first).size(); ++w) {
      uint64_t any = 0;
      for (int64_t r = first; r < last; ++r) any |= p_.plan.row_live(m_, r)[w];
      for (; any; any &= any - 1) {
        const int bit = std::countr_zero(any);
        const int64_t c = static_cast<int64_t>(w) * 64 + bit;
        begin(c);
        for (int64_t r = first; r < last; ++r) {
          if (p_.plan.row_live(m_, r)[w] >> bit & 1) visit(r, c, is_full(r, c));
        }
      }
    }
  }
  /// True if the plan knows every element of a tile to be visible.
  bool is_full(int64_t r, int64_t c) const {
    return (p_.plan.row_full(m_, r)[static_cast<std::size_t>(c / 64)] >> c % 64 & 1) != 0;
  }
  /// The first key tile from c on that row tile r executes, or one past the last key tile.
  int64_t next_key_tile(int64_t r, int64_t c) const {
    const int64_t key_tiles = ceil_div(p_.seqlen_k, kTileKeys);
    if (c >= key_tiles) return c;
    const auto live = p_.plan.row_live(m_, r);
    auto w = static_cast<std::size_t>(c / 64);
    uint64_t bits = live[w] & ~uint64_t{0} << c % 64;
    while (!bits && ++w < live.size()) bits = live[w];
    return bits ? static_cast<int64_t>(w) * 64 + std::countr_zero(bits) : key_tiles;
  }
  template <typename F>
  void for_each_row_tile(int64_t c, F&& f) const {
    for_each_live(p_.plan.key_live(m_, c), p_.plan.key_full(m_, c), f);
  }

 private:
  const Problem& p_;
  int64_t m_;
  const uint8_t* dense_ = nullptr;
  ColumnRows columns_{rules::Columns{}};
  rules::PositionBand positions_{};
};

/// Loads the elements of a tile that dropout keeps; flattened as MaskSource::load is.
HWY_FLATTEN inline void load_kept(const DropoutSource& dropout, int64_t r, int64_t c, ElementMask& kept) {
  kept.load(dropout, r * kTileRows, c * kTileKeys);
}

/// The two masks of a panel whose lanes are rows row0.. of a tile, for one key.
struct RowLanes {
  hn::Vec<Words> bit0, bit1;
  const uint32_t* keys;

  RowLanes(const ElementMask& mask, int64_t row0) : keys(mask.rows[row0 / 32]) {
    const auto first = static_cast<uint32_t>(row0 % 32);
    const auto one = hn::Set(kWords, 1u);
    bit0 = hn::Shl(one, hn::Iota(kWords, first));
    bit1 = hn::Shl(one, hn::Iota(kWords, first + static_cast<uint32_t>(kLanes)));
  }
  auto mask0(int64_t key) const { return hn::RebindMask(kFloats, hn::TestBit(hn::Set(kWords, keys[key]), bit0)); }
  auto mask1(int64_t key) const { return hn::RebindMask(kFloats, hn::TestBit(hn::Set(kWords, keys[key]), bit1)); }
};

/// The two masks of a panel whose lanes are keys key0.. of a tile, for one row.
struct KeyLanes {
  const ElementMask& mask;
  int64_t key0;

  auto lanes(int64_t row, int64_t from) const {
    const auto bit = hn::Set(kWords, 1u << (row % 32));
    return hn::RebindMask(kFloats, hn::TestBit(hn::LoadU(kWords, mask.rows[row / 32] + from), bit));
  }
  auto mask0(int64_t row) const { return lanes(row, key0); }
  auto mask1(int64_t row) const { return lanes(row, key0 + kLanes); }
};

}  // namespace flashmask::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // the toggle of FLASHMASK_BACKENDS_CPU_MASKS_INL_H_
