// SPDX-License-Identifier: Apache-2.0
#pragma once

// In place of the header of this name.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <bit>
#include <cstdint>
#include <type_traits>

#include "simt/device.h"

namespace flashmask::ptx {
namespace simulated {

struct Product {
  float* d;
  const uint32_t* a;
  uint32_t b[2];
};

template <typename T>
float to_float(uint32_t bits) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return std::bit_cast<float>(bits << 16);
  // The exponent's bias is 112 less; scaling makes denormal numbers right, too.
  const float magnitude = std::bit_cast<float>((bits & 0x7fff) << 13) * 0x1p112f;
  const uint32_t sign = (bits & 0x8000) << 16;
  const uint32_t infinite = (bits & 0x7c00) == 0x7c00 ? 0x7f800000 : 0;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | infinite | sign);
}

template <typename T>
void multiply(simt::Operands lanes) {
  float a[16][16], b[16][8], d[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const auto& own = *static_cast<const Product*>(lanes[lane]);
    const int g = lane / 4, c = lane % 4;
    for (int i = 0; i < 2; ++i) {
      const int inner = 8 * i + 2 * c;
      for (int h = 0; h < 2; ++h) {
        a[g + 8 * h][inner] = to_float<T>(own.a[h + 2 * i] & 0xffff);
        a[g + 8 * h][inner + 1] = to_float<T>(own.a[h + 2 * i] >> 16);
      }
      b[inner][g] = to_float<T>(own.b[i] & 0xffff);
      b[inner + 1][g] = to_float<T>(own.b[i] >> 16);
    }
    for (int h = 0; h < 2; ++h) {
      for (int e = 0; e < 2; ++e) d[g + 8 * h][2 * c + e] = own.d[2 * h + e];
    }
  }
  for (int row = 0; row < 16; ++row) {
    for (int inner = 0; inner < 16; ++inner) {
      for (int column = 0; column < 8; ++column) d[row][column] += a[row][inner] * b[inner][column];
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    const auto& own = *static_cast<const Product*>(lanes[lane]);
    const int g = lane / 4, c = lane % 4;
    for (int h = 0; h < 2; ++h) {
      for (int e = 0; e < 2; ++e) own.d[2 * h + e] = d[g + 8 * h][2 * c + e];
    }
  }
}

}  // namespace simulated

template <typename T>
void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, simt::Place place = simt::Place::current()) {
  static_assert(std::is_same_v<T, __nv_bfloat16> || std::is_same_v<T, __half>);
  simulated::Product own{d, a, {b0, b1}};
  simt::meet("mma", simt::kWholeWarp, place, &own, simulated::multiply<T>);
}

}  // namespace flashmask::ptx
