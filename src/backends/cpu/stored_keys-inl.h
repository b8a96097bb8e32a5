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
#include <cstring>

#include "backends/cpu/cached_kernels.h"
#include "backends/cpu/rows-inl.h"
#include "cache/visible_keys.h"

HWY_BEFORE_NAMESPACE();
namespace flashmask::cpu::HWY_NAMESPACE {

constexpr int64_t kCachedKeys = KeyTile::kKeys;
/// Rows whose products with four keys the registers hold.
constexpr int kRowsAtOnce = HWY_TARGET <= HWY_AVX3 ? 4 : 2;
constexpr int kKeysAtOnce = 4;

/// The next kPair elements of a row, in an order that their stored type chooses. Queries get the order of the keys
/// once, and out, which has that of the values, its own at the end.
struct VecPair {
  Vec first, second;
};
constexpr int64_t kPair = 2 * kLanes;
/// Products take rows of a multiple of this many elements: half a pair of the widest vectors.
constexpr int64_t kWhole = 16;
static_assert(SoftmaxState::out_stride(1) % kPair == 0);
/// Rows of floats end in zeros up to a multiple of this many elements, so that products read no others.
constexpr int64_t kFilled = std::max(kPair, kWhole);

/// As they lie.
template <typename Element>
HWY_INLINE VecPair load_pair(const Element* from) {
  return {load_floats(from), load_floats(from + kLanes)};
}
/// Even and odd ones, the halves of 32 bits: a shift and an `and` widen them.
template <class Vec32>
HWY_INLINE VecPair even_and_odd(Vec32 words) {
  return {hn::BitCast(kFloats, hn::ShiftLeft<16>(words)),
          hn::BitCast(kFloats, hn::And(words, hn::Set(kWords, 0xffff0000u)))};
}
HWY_INLINE VecPair load_pair(const hwy::bfloat16_t* from) {
  return even_and_odd(hn::LoadU(kWords, reinterpret_cast<const uint32_t*>(from)));
}

/// A pair whose second half of elements is zeros, and not read.
template <typename Element>
HWY_INLINE VecPair load_half_pair(const Element* from) {
  return {load_floats(from), hn::Zero(kFloats)};
}
HWY_INLINE VecPair load_half_pair(const hwy::bfloat16_t* from) {
  return even_and_odd(hn::MaskedLoad(hn::FirstN(kWords, kLanes / 2), kWords, reinterpret_cast<const uint32_t*>(from)));
}

/// Loads a pair; the products take one of the two.
struct WholePair {
  template <typename Element>
  HWY_INLINE VecPair operator()(const Element* from) const {
    return load_pair(from);
  }
};
struct HalfPair {
  template <typename Element>
  HWY_INLINE VecPair operator()(const Element* from) const {
    return load_half_pair(from);
  }
};

/// A row of n elements as floats in pairs, and zeros up to a multiple of kFilled.
template <typename Element>
HWY_INLINE void load_pairs(const Element* from, int64_t n, float* to) {
  const auto load = [&](const Element* at, int64_t c) {
    const VecPair pair = load_pair(at);
    hn::Store(pair.first, kFloats, to + c);
    hn::Store(pair.second, kFloats, to + c + kLanes);
  };
  int64_t c = 0;
  for (; c + kPair <= n; c += kPair) load(from + c, c);
  if (c < n) {
    alignas(64) Element rest[kPair] = {};
    std::memcpy(rest, from + c, static_cast<std::size_t>(n - c) * sizeof(Element));
    load(rest, c);
  }
  std::fill(to + round_up(n, kPair), to + round_up(n, kFilled), 0.0f);
}

/// Gives a row of n floats, in place, the order of a stored type's pairs.
inline void to_pairs(DataType stored, int64_t n, float* row) {
  if (stored != DataType::kBFloat16) return;
  for (int64_t c = 0; c < n; c += kPair) {
    Vec even, odd;
    hn::LoadInterleaved2(kFloats, row + c, even, odd);
    hn::Store(even, kFloats, row + c);
    hn::Store(odd, kFloats, row + c + kLanes);
  }
}
/// The inverse.
inline void from_pairs(DataType stored, int64_t n, float* row) {
  if (stored != DataType::kBFloat16) return;
  for (int64_t c = 0; c < n; c += kPair)
    hn::StoreInterleaved2(hn::Load(kFloats, row + c), hn::Load(kFloats, row + c + kLanes), kFloats, row + c);
}

/// A tile's rows of k or v in the cache, of neighbouring heads.
struct StoredKeys {
  const char* first[kCachedKeys];  ///< the first head's; null where there is no page
  int64_t count = 0;
  int64_t row_bytes, head_stride;  ///< bytes
  bool all_there = true;

  StoredKeys() = default;
  StoredKeys(const TensorView& t, const KeyTile& tile, int64_t hk) : count(tile.count) {
    const auto size = static_cast<int64_t>(element_size(t.dtype));
    row_bytes = size * t.shape[3];
    head_stride = size * t.stride[2];
    for (int64_t n = 0; n < count; ++n) {
      const KeyPlace& at = tile.at[static_cast<std::size_t>(n)];
      first[n] = at.page < 0 ? nullptr
                             : static_cast<const char*>(t.data) +
                                   size * (at.page * t.stride[0] + at.slot * t.stride[1] + hk * t.stride[2]);
      all_there &= first[n] != nullptr;
    }
  }
  bool is_there(int64_t n) const { return n < count && first[n]; }
  HWY_INLINE const char* row(int64_t n, int64_t head) const { return first[n] + head * head_stride; }
};

/// Rows of k or v that are needed next, asked for while others are worked on: pages are anywhere, and no processor
/// guesses the next. Key by key, all heads of each, as they mostly lie.
class RowsAhead {
 public:
  /// None.
  RowsAhead() = default;
  /// `heads` says by bits which heads are read at all.
  RowsAhead(const StoredKeys& keys, int64_t head_count, uint64_t heads)
      : keys_(&keys), heads_(heads), head_count_(head_count) {
    for (int64_t n = 0; n < std::min(kKeysTouched, keys.count); ++n) touch(n);
  }

  /// The next row of a head's pass over a tile, which has as many as there are keys; null if it is none to be read.
  HWY_INLINE const char* next() {
    if (!keys_ || asked_ == keys_->count) return nullptr;
    ++asked_;
    if (head_ == 0 && key_ + kKeysTouched < keys_->count) touch(key_ + kKeysTouched);
    const char* const row = keys_->first[key_] && heads_ >> head_ & 1 ? keys_->row(key_, head_) : nullptr;
    if (++head_ == head_count_) {
      head_ = 0;
      ++key_;
    }
    return row;
  }
  HWY_INLINE void fetch(const char* row) const {
    constexpr int64_t kLine = 64;
    // Level 1 has too few places for lines under way, and for what comes a tile later.
    constexpr int kToL2 = 2;
    if (!row) return;
    for (int64_t n = 0; n < keys_->row_bytes; n += kLine) __builtin_prefetch(row + n, 0, kToL2);
  }
  /// Asks for what is left of a head's pass.
  void finish_pass() {
    while (keys_ && asked_ < keys_->count) fetch(next());
    asked_ = 0;
  }
  void fetch_all() {
    for (int64_t head = 0; head < head_count_; ++head) finish_pass();
  }

 private:
  /// How far ahead of the rows asked for memory's translation is.
  static constexpr int64_t kKeysTouched = 8;
  HWY_INLINE void touch(int64_t key) const {
    if (keys_->first[key]) __builtin_prefetch(keys_->first[key], 0, 3);
  }

  const StoredKeys* keys_ = nullptr;
  uint64_t heads_ = 0;
  int64_t head_count_ = 0;
  int64_t asked_ = 0;           ///< rows of a head's pass
  int64_t key_ = 0, head_ = 0;  ///< the next row's
};

/// The keys of a tile for one head as rows of floats in pairs; zeros where there is no page, and up to a multiple of
/// kKeysAtOnce.
template <typename Element>
void load_tile_of(const StoredKeys& keys, int64_t head, int64_t dim, Rows to) {
  for (int64_t n = 0; n < round_up(keys.count, kKeysAtOnce); ++n, to.at += to.stride) {
    if (keys.is_there(n))
      load_pairs(reinterpret_cast<const Element*>(keys.row(n, head)), dim, to.at);
    else
      std::fill(to.at, to.at + round_up(dim, kFilled), 0.0f);
  }
}

}  // namespace flashmask::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // the toggle of FLASHMASK_BACKENDS_CPU_STORED_KEYS_INL_H_
