// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <vector>

#include "flashmask/mask.h"

namespace flashmask::cli {

/// Neighbouring key columns [begin, end) with equal values.
struct VectorRun {
  int64_t begin = 0, end = 0;
  std::array<int32_t, 4> values{};  ///< one for each vector
};

/// The longest runs of equal columns, ascending. Keeps the first and the last of them: there may be as many as columns.
struct VectorRuns {
  static constexpr int64_t kFirst = 4096, kLast = 6;

  int64_t count = 0;
  std::vector<VectorRun> first{};  ///< at most kFirst
  std::deque<VectorRun> last{};    ///< at most kLast

  /// Adds the next column.
  void append(std::span<const int32_t> values);
};

/// The row intervals of one mask batch entry and head, in the form that says most to a reader.
struct MaskVectors {
  std::string form;     ///< "startend_row_indices", or "band_and_intervals" where none of its forms fits
  std::string meaning;  ///< a line about the form, for people
  bool causal = false;
  int64_t columns = 0;
  std::vector<std::string> names;  ///< "LTS", ...
  VectorRuns runs{};
};

/// startend_row_indices in the smallest form that says exactly what the mask says (leaving out the block
/// mask), or the mask's own band and intervals if there is none. Takes no memory for each column.
MaskVectors mask_vectors(const Mask& mask, int64_t batch, int64_t head);

}  // namespace flashmask::cli
