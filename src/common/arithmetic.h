// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>

namespace flashmask {

/// ceil(a / b) for a >= 0, b > 0.
constexpr int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }

/// The smallest multiple of `b` that is at least `a`.
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

/// a * b * ... of non-negative factors, or nothing if it overflows int64.
template <typename... Factors>
std::optional<int64_t> checked_product(int64_t first, Factors... rest) {
  int64_t product = first;
  const bool overflow = (__builtin_mul_overflow(product, static_cast<int64_t>(rest), &product) || ...);
  if (overflow) return std::nullopt;
  return product;
}

}  // namespace flashmask
