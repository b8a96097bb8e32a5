// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "flashmask/mask.h"

namespace flashmask::cli {

/// The row intervals of one mask batch entry and head, in the form that says most to a reader. Reads the mask's own
/// vectors where it can, so the mask must outlive it.
struct MaskVectors {
  std::string form;     ///< "startend_row_indices", or "band_and_intervals" where none of its forms fits
  std::string meaning;  ///< a line about the form, for people
  bool causal = false;
  int64_t columns = 0;
  std::vector<std::string> names;         ///< "LTS", ...
  std::vector<const int32_t*> vectors{};  ///< one for each name; its columns are `stride` apart
  int64_t stride = 1;
  std::shared_ptr<const std::vector<int32_t>> held{};  ///< storage that `vectors` point into if it is not the mask's

  int32_t at(std::size_t vector, int64_t column) const { return vectors[vector][column * stride]; }
};

/// startend_row_indices in the smallest form that says exactly what the mask says (leaving out the block
/// mask), or the mask's own band and intervals if there is none.
MaskVectors mask_vectors(const Mask& mask, int64_t batch, int64_t head);

/// Columns [begin, end) with the same values.
struct VectorRun {
  int64_t begin = 0, end = 0;
};
/// Calls f for the longest such runs, ascending; there may be as many as columns.
void for_each_equal_run(const MaskVectors& vectors, const std::function<void(const VectorRun&)>& f);

}  // namespace flashmask::cli
