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
  Rows rows;
  HWY_INLINE Vec at(int64_t n, int64_t c) const { return hn::Load(kFloats, rows.at + n * rows.stride + c); }
};
/// A tile's rows where they are stored, all of them whole vectors and there.
template <typename Element>
struct KeysInPlace {
  const StoredKeys& keys;
  HWY_INLINE Vec at(int64_t n, int64_t c) const {
    return load_floats(reinterpret_cast<const Element*>(keys.row[n]) + c);
  }
};

/// Products of kRows rows with kKeys keys from j on. Each is summed up in one order, whatever else is in the tile.
template <int kRows, typename Keys>
HWY_INLINE void multiply_keys(const float* q, int64_t q_stride, const Keys& keys, int64_t j, int64_t depth,
                              float* scores) {
  Vec sum[kRows][kKeysAtOnce];
  for (auto& row : sum) {
    for (Vec& x : row) x = hn::Zero(kFloats);
  }
  for (int64_t c = 0; c < depth; c += kLanes) {
    Vec query[kRows];
    for (int r = 0; r < kRows; ++r) query[r] = hn::Load(kFloats, q + r * q_stride + c);
    for (int n = 0; n < kKeysAtOnce; ++n) {
      const Vec key = keys.at(j + n, c);
      for (int r = 0; r < kRows; ++r) sum[r][n] = hn::MulAdd(query[r], key, sum[r][n]);
    }
  }
  for (int r = 0; r < kRows; ++r) store_sums(sum[r], scores + r * kCachedKeys + j);
}

/// kVectors vectors of columns, from c on, of kRows rows' out = factor * out + weights times the values.
template <int kRows, int kVectors, typename Keys>
HWY_INLINE void add_columns(const float* weights, const Keys& values, int64_t count, int64_t c, const float* factor,
                            float* out, int64_t out_stride) {
  Vec sum[kRows][kVectors];
  for (auto& row : sum) {
    for (Vec& x : row) x = hn::Zero(kFloats);
  }
  for (int64_t j = 0; j < count; ++j) {
    Vec v[kVectors];
    for (int n = 0; n < kVectors; ++n) v[n] = values.at(j, c + n * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const Vec weight = hn::Set(kFloats, weights[r * kCachedKeys + j]);
      for (int n = 0; n < kVectors; ++n) sum[r][n] = hn::MulAdd(weight, v[n], sum[r][n]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    const Vec scale = hn::Set(kFloats, factor[r]);
    for (int n = 0; n < kVectors; ++n) {
      float* const to = out + r * out_stride + c + n * kLanes;
      hn::Store(hn::MulAdd(hn::Load(kFloats, to), scale, sum[r][n]), kFloats, to);
    }
  }
}

template <int kRows, typename Keys>
HWY_INLINE void add_values(const float* weights, const Keys& values, int64_t count, int64_t dim, const float* factor,
                           float* out, int64_t out_stride, RowsAhead* ahead) {
  constexpr int kVectors = 4;
  int64_t c = 0;
  for (; c + kVectors * kLanes <= dim; c += kVectors * kLanes) {
    if (ahead) ahead->fetch(kVectors * kLanes * ahead->share() / dim);
    add_columns<kRows, kVectors>(weights, values, count, c, factor, out, out_stride);
  }
  for (; c < dim; c += kLanes) add_columns<kRows, 1>(weights, values, count, c, factor, out, out_stride);
  if (ahead) ahead->finish_share();
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
