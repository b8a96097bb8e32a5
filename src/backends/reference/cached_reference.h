// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include "call/cached_problem.h"

namespace flashmask::reference {

/// Attention over a cache, element by element in float64.
void cached_forward(const CachedProblem& problem, std::byte*);

}  // namespace flashmask::reference
