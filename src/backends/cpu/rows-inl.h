// SPDX-License-Identifier: Apache-2.0

// Rows of tensors as float32 tiles and panels, and back.

// Included by tile_kernels.cpp, once for each instruction set.
#if defined(FLASHMASK_BACKENDS_CPU_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FLASHMASK_BACKENDS_CPU_ROWS_INL_H_
#undef FLASHMASK_BACKENDS_CPU_ROWS_INL_H_
#else
#define FLASHMASK_BACKENDS_CPU_ROWS_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstring>

#include "backends/cpu/simd-inl.h"
#include "call/problem.h"
#include "flashmask/float16.h"

HWY_BEFORE_NAMESPACE();
namespace flashmask::cpu::HWY_NAMESPACE {

HWY_INLINE Vec load_floats(const float* from) { return hn::LoadU(kFloats, from); }
template <typename Half>
HWY_INLINE Vec load_floats(const Half* from) {
  return hn::PromoteTo(kFloats, hn::LoadU(hn::Rebind<Half, Floats>(), from));
}
/// e4m3 by way of float16, whose exponents are 8 less: exact, for subnormal numbers, too.
HWY_INLINE Vec load_floats(const uint8_t* from) {
  const hn::Rebind<uint16_t, Floats> halves;
  const auto bits = hn::PromoteTo(halves, hn::LoadU(hn::Rebind<uint8_t, Floats>(), from));
  const auto magnitude = hn::And(bits, hn::Set(halves, uint16_t{0x7f}));
  const auto sign = hn::ShiftLeft<8>(hn::And(bits, hn::Set(halves, uint16_t{0x80})));
  const auto nan =
      hn::IfThenElseZero(hn::Eq(magnitude, hn::Set(halves, uint16_t{0x7f})), hn::Set(halves, uint16_t{0x7e00}));
  const auto half = hn::Or(hn::Or(sign, hn::ShiftLeft<7>(magnitude)), nan);
  return hn::Mul(hn::PromoteTo(kFloats, hn::BitCast(hn::Rebind<hwy::float16_t, Floats>(), half)),
                 hn::Set(kFloats, 256.0f));
}

/// factor * a row of n elements, read in whole vectors.
template <typename Element>
HWY_INLINE void load_row(const Element* from, int64_t n, float factor, float* to) {
  const Vec scale = hn::Set(kFloats, factor);
  int64_t c = 0;
  for (; c + kLanes <= n; c += kLanes) hn::Store(hn::Mul(scale, load_floats(from + c)), kFloats, to + c);
  if (c == n) return;
  alignas(64) Element rest[kLanes] = {};
  std::memcpy(rest, from + c, static_cast<std::size_t>(n - c) * sizeof(Element));
  alignas(64) float promoted[kLanes];
  hn::Store(hn::Mul(scale, load_floats(rest)), kFloats, promoted);
  std::copy(promoted, promoted + (n - c), to + c);
}

template <typename Element>
void load_rows_of(const TensorView& t, int64_t b, int64_t row0, int64_t count, int64_t h, float factor, Rows to) {
  const int64_t dim = t.shape[3], step = t.stride[3];
  for (int64_t s = 0; s < count; ++s, to.at += to.stride) {
    const Element* from = row_at<const Element>(t, b, row0 + s, h);
    alignas(64) Element gathered[256];
    if (step != 1 && dim != 1) {
      for (int64_t c = 0; c < dim; ++c) std::memcpy(gathered + c, from + c * step, sizeof(Element));
      from = gathered;
    }
    load_row(from, dim, factor, to.at);
  }
}

/// factor * rows [row0, row0 + count) of head h as float32. The last dimension may have any stride.
inline void load_rows(const TensorView& t, int64_t b, int64_t row0, int64_t count, int64_t h, float factor, Rows to) {
  if (t.dtype == DataType::kFloat32) return load_rows_of<float>(t, b, row0, count, h, factor, to);
  if (t.dtype == DataType::kBFloat16) return load_rows_of<hwy::bfloat16_t>(t, b, row0, count, h, factor, to);
  load_rows_of<hwy::float16_t>(t, b, row0, count, h, factor, to);
}

/// The tile's rows as panels: panels[p][c][lane] = rows[p * kWidth + lane][c], zero past the last row.
inline void make_panels(Rows rows, int64_t count, int64_t tile_rows, int64_t dim, float* panels) {
  for (int64_t p = 0; p < tile_rows / kWidth; ++p, panels += dim * kWidth) {
    for (int64_t lane = 0; lane < kWidth; ++lane) {
      const int64_t row = p * kWidth + lane;
      for (int64_t c = 0; c < dim; ++c) panels[c * kWidth + lane] = row < count ? rows.at[row * rows.stride + c] : 0.0f;
    }
  }
}

inline void store_row(const float* from, int64_t n, const TensorView& t, int64_t b, int64_t s, int64_t h) {
  if (t.dtype == DataType::kFloat32) {
    std::copy(from, from + n, row_at<float>(t, b, s, h));
  } else if (t.dtype == DataType::kBFloat16) {
    uint16_t* to = row_at<uint16_t>(t, b, s, h);
    for (int64_t c = 0; c < n; ++c) to[c] = float_to_bfloat16(from[c]);
  } else {
    uint16_t* to = row_at<uint16_t>(t, b, s, h);
    for (int64_t c = 0; c < n; ++c) to[c] = float_to_float16(from[c]);
  }
}

/// Writes factor[row] * panels back as rows [row0, row0 + count) of head h.
inline void store_panels(const float* panels, int64_t count, int64_t dim, const float* factor, const TensorView& t,
                         int64_t b, int64_t row0, int64_t h) {
  float row[256];
  for (int64_t s = 0; s < count; ++s) {
    const float* from = panels + s / kWidth * dim * kWidth + s % kWidth;
    for (int64_t c = 0; c < dim; ++c) row[c] = factor[s] * from[c * kWidth];
    store_row(row, dim, t, b, row0 + s, h);
  }
}

}  // namespace flashmask::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // the toggle of FLASHMASK_BACKENDS_CPU_ROWS_INL_H_
