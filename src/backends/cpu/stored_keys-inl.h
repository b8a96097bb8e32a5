// SPDX-License-Identifier: Apache-2.0

// Rows of a cache: where they are stored, fetched ahead, and as floats.

// Included by cached_kernels.cpp, once for each instruction set.
#if defined(FLASHMASK_BACKENDS_CPU_STORED_KEYS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FLASHMASK_BACKENDS_CPU_STORED_KEYS_INL_H_
#undef FLASHMASK_BACKENDS_CPU_STORED_KEYS_INL_H_
#else
#define FLASHMASK_BACKENDS_CPU_STORED_KEYS_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstdint>

#include "backends/cpu/cached_kernels.h"
#include "backends/cpu/rows-inl.h"
#include "cache/visible_keys.h"

HWY_BEFORE_NAMESPACE();
namespace flashmask::cpu::HWY_NAMESPACE {

constexpr int64_t kCachedKeys = KeyTile::kKeys;
/// Rows whose products with four keys the registers hold.
constexpr int kRowsAtOnce = HWY_TARGET <= HWY_AVX3 ? 4 : 2;
constexpr int kKeysAtOnce = 4;

/// factor * a row of n elements, and zeros up to the padded end.
template <typename Element>
HWY_INLINE void load_padded(const Element* from, int64_t n, float factor, float* to) {
  load_row(from, n, factor, to);
  std::fill(to + n, to + round_up(n, 16), 0.0f);
}

/// A tile's rows of k or v of one head in the cache.
struct StoredKeys {
  const char* row[kCachedKeys];  ///< null where there is no page
  int64_t count;

  StoredKeys(const TensorView& t, const KeyTile& tile, int64_t hk) : count(tile.count) {
    const auto size = static_cast<int64_t>(element_size(t.dtype));
    for (int64_t n = 0; n < count; ++n) {
      const KeyPlace& at = tile.at[static_cast<std::size_t>(n)];
      row[n] = at.page < 0 ? nullptr
                           : static_cast<const char*>(t.data) +
                                 size * (at.page * t.stride[0] + at.slot * t.stride[1] + hk * t.stride[2]);
    }
  }
  bool is_there(int64_t n) const { return n < count && row[n]; }
};

/// Rows of k or v that are needed next, asked for while others are worked on: pages are anywhere, and no processor
/// guesses the next. Key by key, all heads of each, as they mostly lie.
class RowsAhead {
 public:
  /// None.
  RowsAhead() = default;
  /// `heads` says by bits which heads are read at all.
  RowsAhead(const TensorView& t, const KeyTile& tile, const PackedRows& rows, uint64_t heads)
      : t_(&t),
        tile_(&tile),
        heads_(heads),
        hk_(rows.hk),
        head_count_(rows.heads),
        element_(static_cast<int64_t>(element_size(t.dtype))),
        bytes_(t.shape[3] * element_),
        head_(rows.heads) {}

  /// Rows for each head's pass over a tile.
  int64_t share() const { return tile_ ? tile_->count : 0; }
  /// Asks for the next `count` rows.
  HWY_INLINE void fetch(int64_t count) {
    constexpr int64_t kLine = 64;
    // Level 1 has too few places for lines under way, and for what comes a tile later.
    constexpr int kToL2 = 2;
    asked_ += count;
    for (; count > 0; --count) {
      if (head_ == head_count_) begin_key();
      if (row_ && heads_ >> head_ & 1) {
        for (int64_t n = 0; n < bytes_; n += kLine) __builtin_prefetch(row_ + n, 0, kToL2);
      }
      row_ += row_ ? t_->stride[2] * element_ : 0;
      ++head_;
    }
  }
  /// Asks for what is left of a head's share.
  void finish_share() {
    fetch(share() - asked_);
    asked_ = 0;
  }
  void fetch_all() {
    for (int64_t head = 0; head < head_count_; ++head) finish_share();
  }

 private:
  void begin_key() {
    const KeyPlace& at = tile_->at[static_cast<std::size_t>(key_++)];
    row_ = at.page < 0 ? nullptr
                       : static_cast<const char*>(t_->data) +
                             element_ * (at.page * t_->stride[0] + at.slot * t_->stride[1] + hk_ * t_->stride[2]);
    head_ = 0;
  }

  const TensorView* t_ = nullptr;
  const KeyTile* tile_ = nullptr;
  uint64_t heads_ = 0;
  int64_t hk_ = 0, head_count_ = 0, element_ = 0, bytes_ = 0;
  int64_t asked_ = 0;           ///< how much of a head's share
  int64_t key_ = 0, head_ = 0;  ///< the key after the one whose rows come, and the head of the next
  const char* row_ = nullptr;
};

/// The keys of a tile for one head as rows of floats; zeros where there is no page, and up to a multiple of what the
/// products take at once.
template <typename Element>
void load_tile_of(const StoredKeys& keys, int64_t dim, Rows to) {
  for (int64_t n = 0; n < round_up(keys.count, kKeysAtOnce); ++n, to.at += to.stride) {
    if (keys.is_there(n))
      load_padded(reinterpret_cast<const Element*>(keys.row[n]), dim, 1.0f, to.at);
    else
      std::fill(to.at, to.at + round_up(dim, 16), 0.0f);
  }
}

}  // namespace flashmask::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // the toggle of FLASHMASK_BACKENDS_CPU_STORED_KEYS_INL_H_
