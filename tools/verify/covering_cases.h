// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "verify/case.h"

namespace flashmask::verify {

/// Values that the cases are made of, for backends that take only a part; an empty list means all.
struct CoveringValues {
  std::vector<DataType> dtypes{};
  std::vector<int64_t> head_dims{};  ///< head_dim and head_dim_v
  std::vector<Layout> layouts{};
  std::vector<CaseFeatures> features{};
  bool operator==(const CoveringValues&) const = default;
};

/// Values that the cuda backend takes.
CoveringValues cuda_values();

/// Combinations of features in the list that hold none that a backend refuses.
std::vector<CaseFeatures> covering_features(const std::string& backend);

/// The fixed list of cases that every backend is checked on: at least 1,500, the same in every run. Every
/// two values of different dimensions (batch, lengths, heads, head dim, family, mask heads and batch, block
/// mask, dtype, layout, ...) meet in some case. Long sequences meet many heads, large batches and large head
/// dims one at a time, so that a slow oracle can check the list. Restricted to some `values`, the pairs of these meet.
/// Throws Error on a head dim that the list does not have.
std::vector<Case> covering_cases(const CoveringValues& values = {});

}  // namespace flashmask::verify
