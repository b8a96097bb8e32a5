// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "call/launch.h"
#include "call/problem.h"

namespace flashmask::sm90 {

/// The forward pass of a call of the element types kDataTypes, or why the kernels do not take it, TMA's
/// requirements aside (tensor_maps_refusal).
Prepared prepare_forward(const Problem& p);

/// Every forward kernel in this build.
std::vector<KernelInfo> forward_kernels();

}  // namespace flashmask::sm90
