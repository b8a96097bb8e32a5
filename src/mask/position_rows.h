// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "mask/rules.h"

namespace flashmask {

/// Which rows a band over positions hides a key from, found without looking at rows that are all alike.
class PositionRows {
 public:
  PositionRows(const rules::PositionBand& band, int64_t seqlen_q);

  /// Adds the runs of rows that `key` is hidden from to `hidden`, ascending. None without positions.
  void add_hidden(int64_t key, std::vector<rules::Interval>& hidden) const;

 private:
  rules::PositionBand band_;
  int32_t seqlen_q_;
  std::vector<rules::PositionRange> parts_;  // range of each kPart rows
};

}  // namespace flashmask
