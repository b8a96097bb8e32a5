// SPDX-License-Identifier: Apache-2.0
#pragma once

// Scales that pages of float8 e4m3 get while tokens are appended to them, for hosts and devices: powers of two that
// only grow, so that numbers which are stored already follow by a change of their exponents.

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "mask/rules.h"

namespace flashmask {

/// The scale of a page of zeros.
inline constexpr float kLeastPageScale = FLT_MIN;

/// How often the scale, above 0, doubles until `largest` is no more than 448 of it.
FLASHMASK_RULE int32_t doublings(float scale, double largest) {
  const double reach = 448.0 * static_cast<double>(scale);
  if (!(largest > reach)) return 0;
  int exponent = 0;
  const double fraction = frexp(largest / reach, &exponent);  // in [0.5, 1)
  return fraction > 0.5 ? exponent : exponent - 1;
}

/// A page's scale, and how often the numbers that it holds have to be halved for it.
struct PageScale {
  float scale;
  int32_t halvings;
};

/// Grows a page's scale for new numbers up to `largest` in magnitude. A page that begins, or whose scale is not a
/// positive number, holds none yet.
FLASHMASK_RULE PageScale grown_page_scale(float scale, bool begins, double largest) {
  const bool is_new = begins || !(scale > 0 && scale <= FLT_MAX);
  const float from = is_new ? kLeastPageScale : scale;
  const int32_t times = doublings(from, largest < FLT_MAX ? largest : static_cast<double>(FLT_MAX));
  return {ldexpf(from, times), is_new ? 0 : times};
}

/// Half of a number of e4m3, so many times: exact where it stays normal, else rounded once, to nearest even. NaN stays.
FLASHMASK_RULE uint8_t halved_e4m3(uint8_t bits, int32_t times) {
  const int32_t magnitude = bits & 0x7f, exponent = magnitude >> 3, digits = magnitude & 7;
  const auto signed_bits = [&](int32_t x) { return static_cast<uint8_t>((bits & 0x80) | x); };
  if (magnitude == 0x7f || times <= 0) return bits;
  if (exponent > times) return signed_bits(magnitude - 8 * times);
  const int32_t number = exponent > 0 ? 8 + digits : digits, drop = exponent > 0 ? times - exponent + 1 : times;
  if (drop > 4) return signed_bits(0);  // number is at most 15
  const int32_t kept = number >> drop, rest = number & ((1 << drop) - 1), half = 1 << (drop - 1);
  return signed_bits(kept + (rest > half || (rest == half && kept % 2 == 1) ? 1 : 0));
}

/// The magnitude of a number as it counts for a page's scale: what is not finite does not, since scales never shrink.
FLASHMASK_RULE double finite_magnitude(double x) {
  const double magnitude = fabs(x);
  return magnitude <= DBL_MAX ? magnitude : 0;
}

}  // namespace flashmask
