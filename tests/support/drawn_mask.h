// SPDX-License-Identifier: Apache-2.0
#pragma once

// Masks drawn by hand: one string per query row, '#' = visible, '.' = hidden.

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "flashmask/mask.h"

namespace flashmask::test {

/// A dense visibility matrix [seqlen_q, seqlen_k].
struct Drawing {
  int64_t seqlen_q = 0, seqlen_k = 0;
  std::vector<uint8_t> visible;

  TensorView tensor() const { return TensorView::contiguous(visible.data(), DataType::kBool, {seqlen_q, seqlen_k}); }
};

/// Reads a drawing; every row must have the same length.
inline Drawing parse_drawing(const std::vector<std::string>& rows) {
  Drawing drawing;
  drawing.seqlen_q = static_cast<int64_t>(rows.size());
  drawing.seqlen_k = rows.empty() ? 0 : static_cast<int64_t>(rows[0].size());
  for (const std::string& row : rows) {
    if (static_cast<int64_t>(row.size()) != drawing.seqlen_k)
      throw std::invalid_argument("rows of a drawing differ in length: " + row);
    for (const char c : row) {
      if (c != '#' && c != '.') throw std::invalid_argument("a drawing has '#' and '.' only: " + row);
      drawing.visible.push_back(c == '#');
    }
  }
  return drawing;
}

/// The text of the dense matrix [seqlen_q, seqlen_k] at `visible`: what a failed comparison shows.
inline std::string draw(std::span<const uint8_t> visible, int64_t seqlen_q, int64_t seqlen_k) {
  std::string text;
  for (int64_t i = 0; i < seqlen_q; ++i) {
    for (int64_t j = 0; j < seqlen_k; ++j) text += visible[static_cast<std::size_t>(i * seqlen_k + j)] ? '#' : '.';
    text += '\n';
  }
  return text;
}

}  // namespace flashmask::test
