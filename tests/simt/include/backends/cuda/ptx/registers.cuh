// SPDX-License-Identifier: Apache-2.0
#pragma once

// In place of the header of this name: what its instructions do.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <bit>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "simt/device.h"

namespace flashmask::ptx {

inline uint32_t lane() { return threadIdx.x % 32; }
inline bool is_leader() { return lane() == 0; }
inline uint32_t reload_lane() { return lane(); }

inline uint32_t uniform(uint32_t x, simt::Place place = simt::Place::current()) {
  return __reduce_or_sync(simt::kWholeWarp, x, place);
}
inline uint64_t uniform(uint64_t x, simt::Place place = simt::Place::current()) {
  return uint64_t{uniform(static_cast<uint32_t>(x >> 32), place)} << 32 | uniform(static_cast<uint32_t>(x), place);
}
template <typename T>
T from_leader(const T& x, simt::Place place = simt::Place::current()) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  using Word = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
  return static_cast<T>(uniform(is_leader() ? static_cast<Word>(x) : Word{0}, place));
}

template <typename T>
T load_here(const T* from, uint32_t index) {
  return from[index];
}
inline uint32_t opaque(uint32_t x) { return x; }
template <int N>
void pin(float (&)[N]) {}
template <int N>
void copy(const float* d, float (&to)[N]) {
  for (int i = 0; i < N; ++i) to[i] = d[i];
}

inline void hide_unless(uint32_t visible, float& x) {
  if (visible == 0) x = -INFINITY;
}
inline void zero_if(uint32_t dropped, float& x) {
  if (dropped != 0) x = 0;
}

template <typename T>
uint32_t pack(float low, float high) {
  static_assert(sizeof(T) == 2);
  const auto bits = [](float x) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      return std::bit_cast<uint16_t>(__float2bfloat16_rn(x));
    } else {
      return std::bit_cast<uint16_t>(__float2half_rn(x));
    }
  };
  return uint32_t{bits(high)} << 16 | bits(low);
}

/// Denormal numbers are zeros of their sign.
inline float flush(float x) { return std::fabs(x) < FLT_MIN ? std::copysign(0.0F, x) : x; }

inline float inverse_approx(float x) { return flush(1 / flush(x)); }
/// To 12 bits: a relative error of up to 2^-12, where the instruction's is up to 2^-11 and mostly far below.
inline float tanh_approx(float x) {
  constexpr uint32_t kHalf = 1u << 11;
  const float y = std::tanh(x);
  if (std::isnan(y)) return y;
  return std::bit_cast<float>((std::bit_cast<uint32_t>(y) + kHalf) & ~(2 * kHalf - 1));
}
inline uint32_t double_plus_carry(uint32_t x, uint32_t a, uint32_t b) { return 2 * x + (a + b < a); }
inline float min_or_nan(float a, float b) {
  if (std::isnan(a) || std::isnan(b)) return NAN;
  return std::fmin(a, b);
}
inline float exp2_approx(float x) { return flush(std::exp2(flush(x))); }

}  // namespace flashmask::ptx
