// SPDX-License-Identifier: Apache-2.0
#include "mask/position_rows.h"

#include <algorithm>

namespace flashmask {
namespace {

/// Rows that are looked at together.
constexpr int32_t kPart = 64;

void add_row_run(int32_t begin, int32_t end, std::vector<rules::Interval>& hidden, std::size_t first) {
  if (hidden.size() > first && hidden.back().end == begin) {
    hidden.back().end = end;
  } else {
    hidden.push_back({begin, end});
  }
}

}  // namespace

PositionRows::PositionRows(const rules::PositionBand& band, int64_t seqlen_q)
    : band_(band), seqlen_q_(static_cast<int32_t>(seqlen_q)) {
  if (!band.q_pos) return;
  parts_.resize(static_cast<std::size_t>(seqlen_q / kPart + (seqlen_q % kPart != 0)));
  for (int32_t i = 0; i < seqlen_q_; ++i) {
    rules::PositionRange& part = parts_[static_cast<std::size_t>(i / kPart)];
    part = rules::with(part, band.q_pos[i]);
  }
}

void PositionRows::add_hidden(int64_t key, std::vector<rules::Interval>& hidden) const {
  if (!band_.q_pos) return;
  const std::size_t first = hidden.size();
  const int32_t k_pos = band_.k_pos[key];
  const rules::PositionRange keys{k_pos, k_pos};
  int32_t begin = 0;
  for (const rules::PositionRange& rows : parts_) {
    const int32_t end = begin + std::min(kPart, seqlen_q_ - begin);
    if (!rules::some_in_band(band_, rows, keys)) {
      add_row_run(begin, end, hidden, first);
    } else if (!rules::all_in_band(band_, rows, keys)) {
      for (int32_t i = begin; i < end; ++i) {
        if (!rules::in_band(band_, band_.q_pos[i], k_pos)) add_row_run(i, i + 1, hidden, first);
      }
    }
    begin = end;
  }
}

}  // namespace flashmask
