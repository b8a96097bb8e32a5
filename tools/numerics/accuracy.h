// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>

#include "flashmask/tensor.h"

/// The accuracy rule: how far a result may be from the oracle's.
///   16-bit types: 2 x the error of the plain implementation (plain.h) on the same values + 1e-5. dq and dk may keep to
///     that against the oracle, or against the exact gradients for the rounded out that the backward is handed. In
///     `flashmask verify` the plain implementation's error is at least half a unit in the last place of the largest
///     number, which it may have rounded well by chance;
///   float32: 1e-5 x the largest value of the oracle's, at least 2^-126; of dq and dk, which are differences of two
///     sums (P dP and P delta times K or Q) and may cancel, `flashmask run` takes 2e-6 x their largest if it is more;
///   dsink: 1e-5 x a sum of the size that its terms usually have, in every type (tools/verify/check.cpp);
///   lse: 1e-3 x max(1, |lse|) for 16-bit types, 1e-5 x that for float32, and -inf exactly where the oracle has it.
/// docs/decisions/gradient-accuracy.md says why.
namespace flashmask::numerics {

inline constexpr double kPlainFactor = 2, kPlainFloor = 1e-5;
inline constexpr double kFloat32Relative = 1e-5, kFloat32Cancelled = 2e-6;
inline constexpr double kSmallestNormal = 0x1p-126;  ///< float32's

/// Limit of an error in a 16-bit type, given the plain implementation's largest error.
constexpr double plain_limit(double plain_error) { return kPlainFactor * plain_error + kPlainFloor; }

/// Limit of an error in float32, given the oracle's largest absolute value. Weights below the smallest normal number
/// may vanish.
constexpr double float32_limit(double largest) { return std::max(kFloat32Relative * largest, kSmallestNormal); }

/// Limit for a difference of sums whose largest absolute value is `largest_sum`.
constexpr double float32_limit(double largest, double largest_sum) {
  return std::max(float32_limit(largest), kFloat32Cancelled * largest_sum);
}

/// Half a unit in the last place, of a value between 1 and 2 in this dtype.
constexpr double half_unit(DataType dtype) {
  return dtype == DataType::kBFloat16 ? 0x1p-8 : dtype == DataType::kFloat16 ? 0x1p-11 : 0x1p-24;
}

/// Half a unit in the last place of `value`: the most that rounding takes from a number of its size. Numbers of float16
/// below 2^-14 are equally far apart.
inline double rounding(DataType dtype, double value) {
  const int least = dtype == DataType::kFloat16 ? -14 : -126;
  return value == 0 ? 0 : std::ldexp(half_unit(dtype), std::max(std::ilogb(value), least));
}

/// Limit of an error that rounding makes alone: of weights, each by up to half a unit, whose terms' magnitudes add up
/// to `largest_sum` at most, and of the result.
inline double rounded_weights_limit(DataType dtype, double largest_sum, double largest) {
  return half_unit(dtype) * largest_sum + rounding(dtype, largest);
}

/// Limit of an error that rounding scores of magnitude `score` to float32 makes: of weights, in their terms and in
/// their sum.
inline double rounded_scores_limit(double score, double largest_sum) {
  return 2 * rounding(DataType::kFloat32, score) * largest_sum;
}

/// Limit of an error of lse, in lse_unit()s.
constexpr double lse_limit(DataType dtype) { return dtype == DataType::kFloat32 ? 1e-5 : 1e-3; }
inline double lse_unit(double lse) { return std::isfinite(lse) ? std::max(1.0, std::fabs(lse)) : 1; }

/// 0 also for equal infinities; NaN if either is.
inline double difference(double got, double exact) { return got == exact ? 0 : std::fabs(got - exact); }

}  // namespace flashmask::numerics
