// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "verify/cached_case.h"

namespace flashmask::verify {

/// Case `index` of the endless list of calls over caches that belongs to `seed` and a backend, which takes most of
/// them: small enough to be checked in a fraction of a second.
CachedCase random_cached_case(uint64_t seed, int64_t index, std::string_view backend = "cpu");

/// The backend's fixed list of calls over caches, in which each value of a dimension meets some of every other.
std::vector<CachedCase> covering_cached_cases(std::string_view backend = "cpu");

}  // namespace flashmask::verify
