// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "call/cached_problem.h"

namespace flashmask {

/// Throws kInvalidArgument, naming the first argument that differs, unless the plan was last built for such a call.
void check_is_built_for(const CachedPlan& plan, const CachedProblem& problem);

}  // namespace flashmask
