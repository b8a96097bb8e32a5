// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>

#include "common/random.h"

namespace flashmask::verify {

/// The library's seeded draws, and normal ones.
class Random : public flashmask::Random {
 public:
  using flashmask::Random::Random;

  /// Standard normal (Box-Muller; the second of each pair is kept for the next call).
  double normal() {
    if (has_spare_) {
      has_spare_ = false;
      return spare_;
    }
    const double radius = std::sqrt(-2 * std::log(1 - real())), angle = 2 * std::numbers::pi * real();
    spare_ = radius * std::sin(angle);
    has_spare_ = true;
    return radius * std::cos(angle);
  }

 private:
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

/// Streams of one case's draws, one for each purpose.
inline constexpr uint64_t kMaskStream = 1, kBandStream = 2, kBlockStream = 3, kTensorStream = 4, kDropoutStream = 5,
                          kPositionStream = 7;

}  // namespace flashmask::verify
