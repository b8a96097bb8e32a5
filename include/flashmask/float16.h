// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

namespace flashmask {

/// Scalar conversions of the two 16-bit types, round to nearest even; NaN stays NaN (quiet). For setting up
/// and reading back tensors; the backends have their own vector code.

inline float bfloat16_to_float(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

inline uint16_t float_to_bfloat16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float float16_to_float(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t magnitude = bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return std::bit_cast<float>(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  if (magnitude < 0x400u) {  // subnormal: magnitude / 2^24, exact in float
    const float value = static_cast<float>(magnitude) * 0x1p-24f;
    return sign ? -value : value;
  }
  return std::bit_cast<float>(sign | ((magnitude << 13) + 0x38000000u));
}

inline uint16_t float_to_float16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to 65520 or more: infinity
  if (magnitude < 0x38800000u) {
    // Subnormal: adding 0.5 lines the last kept bit up with the end of the float's mantissa, which rounds it.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u));
  }
  const uint32_t rounded = magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u);
  return static_cast<uint16_t>(sign | rounded >> 13);
}

/// e4m3fn (arXiv:2209.05433): no infinity, 0x7f and 0xff are NaN, 448 is the largest.
inline float float8_e4m3_to_float(uint8_t bits) {
  const uint32_t magnitude = bits & 0x7fu;
  float value = std::numeric_limits<float>::quiet_NaN();
  if (magnitude < 8) {
    value = static_cast<float>(magnitude) * 0x1p-9f;  // subnormal
  } else if (magnitude < 0x7fu) {
    value = std::bit_cast<float>((magnitude << 20) + 0x3c000000u);
  }
  return bits & 0x80u ? -value : value;
}

/// Rounds to nearest even; magnitudes beyond 448 become 448, as cvt.rn.satfinite has it.
inline uint8_t float_to_float8_e4m3(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const auto sign = static_cast<uint8_t>(bits >> 24 & 0x80u);
  if (magnitude > 0x7f800000u) return static_cast<uint8_t>(sign | 0x7fu);
  if (magnitude >= 0x43e00000u) return static_cast<uint8_t>(sign | 0x7eu);
  if (magnitude < 0x3c800000u) {
    // Subnormal, in units of 2^-9: adding 2^14 lines the last kept bit up with the end of the float's mantissa.
    const float shifted = std::bit_cast<float>(magnitude) + 0x1p14f;
    return static_cast<uint8_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x46800000u));
  }
  const uint32_t rounded = magnitude - 0x3c000000u + 0x7ffffu + (magnitude >> 20 & 1u);
  return static_cast<uint8_t>(sign | rounded >> 20);
}

}  // namespace flashmask
