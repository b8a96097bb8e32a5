// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "flashmask/mask.h"

namespace flashmask::cli {

/// The row intervals of one mask batch entry and head, in the form that says most to a reader.
struct MaskVectors {
  std::string form;     ///< "startend_row_indices", or "band_and_intervals" where none of its forms fits
  std::string meaning;  ///< a line about the form, for people
  bool causal = false;
  int64_t columns = 0;
  std::vector<std::string> names;              ///< "LTS", ...
  std::vector<std::vector<int32_t>> values{};  ///< one vector for each name
};

/// startend_row_indices in the smallest form that says exactly what the mask says (leaving out the block
/// mask), or the mask's own band and intervals if there is none.
MaskVectors mask_vectors(const Mask& mask, int64_t batch, int64_t head);

/// Columns [begin, end) with the same values.
struct VectorRun {
  int64_t begin = 0, end = 0;
};
std::vector<VectorRun> equal_runs(const MaskVectors& vectors);

}  // namespace flashmask::cli
