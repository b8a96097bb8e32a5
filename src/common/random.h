// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <random>

namespace flashmask {

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

 private:
  std::mt19937_64 engine_;
};

}  // namespace flashmask
