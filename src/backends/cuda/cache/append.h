// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "call/cached_problem.h"

namespace flashmask::cuda {

/// Writes rows into a cache, by one launch on the call's stream.
void launch_append(const AppendProblem& problem);

}  // namespace flashmask::cuda
