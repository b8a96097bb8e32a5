// SPDX-License-Identifier: Apache-2.0

// Products of few rows with many keys: in no lanes lie rows or keys, but the dimension that is summed up.

// Included by cached_kernels.cpp, once for each instruction set.
#if defined(FLASHMASK_BACKENDS_CPU_FEW_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FLASHMASK_BACKENDS_CPU_FEW_ROWS_INL_H_
#undef FLASHMASK_BACKENDS_CPU_FEW_ROWS_INL_H_
#else
#define FLASHMASK_BACKENDS_CPU_FEW_ROWS_INL_H_
#endif

#include <hwy/highway.h>

#include <cstdint>
#include <type_traits>

#include "backends/cpu/simd-inl.h"
#include "backends/cpu/stored_keys-inl.h"

HWY_BEFORE_NAMESPACE();
namespace flashmask::cpu::HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR
/// Writes the sums of the lanes of four vectors.
HWY_INLINE void store_sums(const Vec (&x)[4], float* to) {
  for (int n = 0; n < 4; ++n) to[n] = hn::GetLane(x[n]);
}
#else
/// Sums of blocks of 128 bits: lane by lane, four of them.
template <class D>
HWY_INLINE auto sum_blocks(D, hn::Vec<D> x) {
  if constexpr (hn::MaxLanes(D()) <= 4) {
    return x;
  } else {
    const hn::Half<D> half;
    return sum_blocks(half, hn::Add(hn::LowerHalf(half, x), hn::UpperHalf(half, x)));
  }
}

/// Writes the sums of the lanes of four vectors.
HWY_INLINE void store_sums(const Vec (&x)[4], float* to) {
  const hn::Repartition<uint64_t, Floats> pairs;
  const auto halves = [](Vec a, Vec b) {
    return hn::Add(hn::InterleaveLower(kFloats, a, b), hn::InterleaveUpper(kFloats, a, b));
  };
  const auto a = hn::BitCast(pairs, halves(x[0], x[1])), b = hn::BitCast(pairs, halves(x[2], x[3]));
  const Vec four = hn::Add(hn::BitCast(kFloats, hn::InterleaveLower(pairs, a, b)),
                           hn::BitCast(kFloats, hn::InterleaveUpper(pairs, a, b)));
  hn::StoreU(sum_blocks(kFloats, four), hn::CappedTag<float, 4>(), to);
}
#endif

/// A tile's rows as floats in a thread's scratch.
struct LoadedKeys {
  using LastPair = WholePair;  ///< loads the end of a row that is no whole pairs
  Rows rows;
  HWY_INLINE const float* row(int64_t n) const { return rows.at + n * rows.stride; }
};
/// A head's rows of a tile where they are stored, all of them there.
template <typename Element>
struct KeysInPlace {
  using LastPair = HalfPair;
  const StoredKeys& keys;
  int64_t head;
  HWY_INLINE const Element* row(int64_t n) const { return reinterpret_cast<const Element*>(keys.row(n, head)); }
};

/// Adds the products of kRows rows of q with keys over a pair of elements, which in the keys begins at c.
template <int kRows, typename Element, typename Load>
HWY_INLINE void add_products(const float* q, int64_t q_stride, const Element* const (&key)[kKeysAtOnce], int64_t c,
                             Load load, Vec (&sum)[kRows][kKeysAtOnce]) {
  VecPair query[kRows];
  for (int r = 0; r < kRows; ++r) query[r] = load_pair(q + r * q_stride);
  for (int n = 0; n < kKeysAtOnce; ++n) {
    const VecPair k = load(key[n] + c);
    for (int r = 0; r < kRows; ++r) sum[r][n] = hn::MulAdd(query[r].first, k.first, sum[r][n]);
    for (int r = 0; r < kRows; ++r) sum[r][n] = hn::MulAdd(query[r].second, k.second, sum[r][n]);
  }
}

/// Products of kRows rows with kKeysAtOnce keys from j on, over `depth` elements, a multiple of kWhole. Each is summed
/// up in one order, whatever else is in the tile. Asks for as many rows, one after another between the products.
template <int kRows, typename Keys>
HWY_INLINE void multiply_keys(const float* q, int64_t q_stride, const Keys& keys, int64_t j, int64_t depth,
                              float* scores, RowsAhead& ahead) {
  decltype(keys.row(j)) key[kKeysAtOnce];
  const char* next[kKeysAtOnce];
  for (int n = 0; n < kKeysAtOnce; ++n) {
    key[n] = keys.row(j + n);
    next[n] = ahead.next();
  }
  Vec sum[kRows][kKeysAtOnce];
  for (auto& row : sum) {
    for (Vec& x : row) x = hn::Zero(kFloats);
  }
  int64_t c = 0;
  for (; c + kPair <= depth; c += kPair) {
    if (c < kKeysAtOnce * kPair) ahead.fetch(next[c / kPair]);
    add_products(q + c, q_stride, key, c, WholePair(), sum);
  }
  if (kPair > kWhole && c < depth) add_products(q + c, q_stride, key, c, typename Keys::LastPair(), sum);
  for (int64_t n = depth / kPair; n < kKeysAtOnce; ++n) ahead.fetch(next[n]);
  for (int r = 0; r < kRows; ++r) store_sums(sum[r], scores + r * kCachedKeys + j);
}

/// kPairs pairs of columns, from c on, of kRows rows' out = factor * out + weights times the values, of which there is
/// a multiple of kKeysAtOnce. Asks for `asked` rows beside as many of them.
template <int kRows, int kPairs, typename Load, typename Keys>
HWY_INLINE void add_columns(const float* weights, const Keys& values, int64_t count, int64_t c, const float* factor,
                            float* out, int64_t out_stride, RowsAhead& ahead, int64_t asked) {
  Vec sum[kRows][2 * kPairs];
  for (auto& row : sum) {
    for (Vec& x : row) x = hn::Zero(kFloats);
  }
  for (int64_t j = 0; j < count; j += kKeysAtOnce) {
    decltype(values.row(j)) value[kKeysAtOnce];
    const char* next[kKeysAtOnce];
    for (int i = 0; i < kKeysAtOnce; ++i) {
      value[i] = values.row(j + i) + c;
      next[i] = i < asked ? ahead.next() : nullptr;
    }
    for (int i = 0; i < kKeysAtOnce; ++i) {
      ahead.fetch(next[i]);
      VecPair v[kPairs];
      for (int n = 0; n < kPairs; ++n) v[n] = Load()(value[i] + n * kPair);
      for (int r = 0; r < kRows; ++r) {
        const Vec weight = hn::Set(kFloats, weights[r * kCachedKeys + j + i]);
        for (int n = 0; n < kPairs; ++n) {
          sum[r][2 * n] = hn::MulAdd(weight, v[n].first, sum[r][2 * n]);
          sum[r][2 * n + 1] = hn::MulAdd(weight, v[n].second, sum[r][2 * n + 1]);
        }
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    const Vec scale = hn::Set(kFloats, factor[r]);
    for (int n = 0; n < 2 * kPairs; ++n) {
      float* const to = out + r * out_stride + c + n * kLanes;
      hn::Store(hn::MulAdd(hn::Load(kFloats, to), scale, sum[r][n]), kFloats, to);
    }
  }
}

template <int kRows, typename Keys>
HWY_INLINE void add_values(const float* weights, const Keys& values, int64_t count, int64_t dim, const float* factor,
                           float* out, int64_t out_stride, RowsAhead& ahead) {
  const int64_t asked = ceil_div(2 * kPair * kKeysAtOnce, dim);
  const auto add = [&](auto pairs, auto load, int64_t c) {
    add_columns<kRows, pairs(), decltype(load)>(weights, values, count, c, factor, out, out_stride, ahead, asked);
  };
  constexpr std::integral_constant<int, 2> two;
  constexpr std::integral_constant<int, 1> one;
  int64_t c = 0;
  for (; c + 2 * kPair <= dim; c += 2 * kPair) add(two, WholePair(), c);
  for (; c + kPair <= dim; c += kPair) add(one, WholePair(), c);
  if (kPair > kWhole && c < dim) add(one, typename Keys::LastPair(), c);
}

/// Calls f with the number of rows at once, as a constant, and the first of them.
template <int kRows, typename F>
HWY_INLINE void for_rows_of(int64_t first, int64_t count, const F& f) {
  if constexpr (kRows > 0) {
    for (; count >= kRows; first += kRows, count -= kRows) f(std::integral_constant<int, kRows>(), first);
    for_rows_of<kRows - 1>(first, count, f);
  }
}

}  // namespace flashmask::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // the toggle of FLASHMASK_BACKENDS_CPU_FEW_ROWS_INL_H_
