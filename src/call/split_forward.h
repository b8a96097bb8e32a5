// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "call/cached_problem.h"
#include "call/problem.h"

namespace flashmask {

/// A forward with split_size as a call over a cache of one page a batch entry: its tensors, options and positions. Its
/// mask is not there, as plans say what rows see.
CachedProblem as_cached(const Problem& forward);

}  // namespace flashmask
