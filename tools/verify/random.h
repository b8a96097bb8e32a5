// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>
#include <random>

namespace flashmask::verify {

/// Seeded draws that are the same on every platform (the standard's distributions are not).
class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}

  /// Uniform in [low, high]; low <= high.
  int64_t integer(int64_t low, int64_t high) {
    const uint64_t range = static_cast<uint64_t>(high) - static_cast<uint64_t>(low) + 1;
    const uint64_t draw = engine_();
    return range == 0 ? static_cast<int64_t>(draw) : low + static_cast<int64_t>(draw % range);
  }
  /// Uniform in [0, 1).
  double real() { return static_cast<double>(engine_() >> 11) * 0x1p-53; }
  bool flip() { return (engine_() & 1) != 0; }

  /// Standard normal (Box-Muller; the second of each pair is kept for the next call).
  double normal() {
    if (has_spare_) {
      has_spare_ = false;
      return spare_;
    }
    constexpr double kTwoPi = 6.283185307179586;
    const double radius = std::sqrt(-2 * std::log(1 - real())), angle = kTwoPi * real();
    spare_ = radius * std::sin(angle);
    has_spare_ = true;
    return radius * std::cos(angle);
  }

 private:
  std::mt19937_64 engine_;
  double spare_ = 0;
  bool has_spare_ = false;
};

/// A seed that depends on both (splitmix64's finalizer).
constexpr uint64_t mix(uint64_t seed, uint64_t value) {
  uint64_t x = seed + 0x9e3779b97f4a7c15u * (value + 1);
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/// What the draws of one case are for: each has a stream of its own.
inline constexpr uint64_t kMaskStream = 1, kBandStream = 2, kBlockStream = 3, kTensorStream = 4;

}  // namespace flashmask::verify
