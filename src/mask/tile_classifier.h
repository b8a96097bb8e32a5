// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "mask/rules.h"

namespace flashmask {

/// Classifies the row tiles of one range of key columns at a time: exact, and linear in the number of
/// columns plus one 64th of the number of row tiles. Reuse one object for all ranges.
class TileClassifier {
 public:
  TileClassifier(int64_t seqlen_q, int64_t tile_rows);

  /// 64-bit words of one answer.
  int64_t words() const { return static_cast<int64_t>(dirty_.size()); }

  /// Bit r % 64 of word r / 64 of `live` (`full`) is set if some (every) element of row tile r and keys
  /// [key_begin, key_end) is visible. Both spans have words() entries; bits past the last tile are clear.
  void classify(const rules::Columns& columns, int64_t key_begin, int64_t key_end, std::span<uint64_t> live,
                std::span<uint64_t> full);

 private:
  void add(std::vector<int32_t>& events, rules::Interval tiles);

  int32_t seqlen_q_, tile_rows_, tiles_;
  // Difference arrays over the row tiles: how many columns begin or stop to be hidden from whole tiles, and
  // to touch tiles. Only words of 64 tiles in which something happens are marked and walked.
  std::vector<int32_t> covered_, touched_;
  std::vector<uint8_t> dirty_;
};

}  // namespace flashmask
