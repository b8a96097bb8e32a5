// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "placement/visibility.h"

namespace flashmask::placement {

/// Exchanges chunks of units between ranks until loads are within `load_slack` of the mean, and received keys few:
/// kBalanced in placement.h. `owner` is where it begins; how many units a rank has does not change.
std::vector<int32_t> exchange(std::span<const Visibility> masks, std::vector<int32_t> owner, int64_t ranks,
                              double load_slack);

}  // namespace flashmask::placement
