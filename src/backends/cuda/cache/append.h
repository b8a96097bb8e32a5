// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "call/cached_problem.h"
#include "call/launch.h"

namespace flashmask::cuda {

/// Writes rows into a cache, by one launch on the call's stream.
void launch_append(const AppendProblem& problem);

/// The kernels that do.
std::vector<KernelInfo> append_kernels();

}  // namespace flashmask::cuda
