// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "call/launch.h"
#include "call/problem.h"

namespace flashmask::sm80 {

/// The forward pass of a call of the element types cuda::kDataTypes in tiles of at most `kilobytes` of shared memory,
/// or why the kernels do not take it; says nothing of how rows are aligned.
Prepared prepare_forward(const Problem& p, int kilobytes);

/// Every forward kernel in this build.
std::vector<KernelInfo> forward_kernels();

}  // namespace flashmask::sm80
