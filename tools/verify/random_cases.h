// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "verify/case.h"

namespace flashmask::verify {

/// Case `index` of the endless list that belongs to `seed`: a family of `families` at random lengths (odd
/// ones, and seqlen_q != seqlen_k), heads (grouped too), head dims from 8 to 256, dtype, layout, options and features,
/// small enough to be checked in a fraction of a second. `refused` takes away the features that it names, and changes
/// nothing else.
Case random_case(uint64_t seed, int64_t index, std::span<const std::string> families,
                 const std::vector<std::string>& refused = {});

}  // namespace flashmask::verify
