// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "common/random.h"

namespace flashmask {

inline std::string text(const std::vector<int64_t>& values) {
  std::string joined;
  for (const int64_t value : values) {
    if (!joined.empty()) joined += ',';
    joined += std::to_string(value);
  }
  return joined;
}

/// Draws the parameters of a family at a length.
struct Draw {
  int64_t length;
  Random common, own;  ///< common: of the band

  /// `count` lengths, zeros among them now and then, that add up to `total`.
  std::vector<int64_t> lengths(int64_t total, int64_t count) {
    std::vector<int64_t> cuts{0, total};
    for (int64_t n = 1; n < count; ++n) cuts.push_back(own.integer(0, total));
    std::sort(cuts.begin(), cuts.end());
    std::vector<int64_t> own_lengths;
    for (std::size_t n = 1; n < cuts.size(); ++n) own_lengths.push_back(cuts[n] - cuts[n - 1]);
    return own_lengths;
  }

  std::string up_to(int64_t largest) { return std::to_string(own.integer(0, largest)); }
  std::string documents() { return text(lengths(length, own.integer(1, 8))); }

  /// Unbounded now and then, otherwise up to half the length.
  std::string window_reach(Random& random) {
    return std::to_string(random.integer(0, 5) == 0 ? -1 : random.integer(0, length / 2));
  }

  /// Unbounded now and then, otherwise 1 to `largest`.
  std::string window_of(int64_t largest) {
    return std::to_string(own.integer(0, 5) == 0 ? -1 : own.integer(1, std::max<int64_t>(largest, 1)));
  }
};

}  // namespace flashmask
