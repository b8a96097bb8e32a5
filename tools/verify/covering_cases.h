// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "verify/case.h"

namespace flashmask::verify {

/// The fixed list of cases that every backend is checked on: at least 1,500, the same in every run. Every
/// two values of different dimensions (batch, lengths, heads, head dim, family, mask heads and batch, block
/// mask, dtype, layout, ...) meet in some case. Long sequences meet many heads, large batches and large head
/// dims one at a time, so that a slow oracle can check the list.
std::vector<Case> covering_cases();

}  // namespace flashmask::verify
