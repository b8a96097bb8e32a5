// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "call/launch.h"
#include "call/problem.h"

namespace flashmask::sm80 {

/// The gradients of a call of the element types kDataTypes on a device whose blocks may have `kilobytes` of shared
/// memory, or why the kernels do not take it; says nothing of how rows have to be aligned. Every element of dq, dk and
/// dv is written, also where there are no rows or no keys.
Prepared prepare_backward(const Problem& p, int kilobytes);

/// Every backward kernel in this build.
std::vector<KernelInfo> backward_kernels();

}  // namespace flashmask::sm80
