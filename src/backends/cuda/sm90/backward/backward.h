// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "call/launch.h"
#include "call/problem.h"

namespace flashmask::sm90 {

/// The gradients of a call of the element types kDataTypes, or why the kernels do not take it, TMA's
/// requirements aside (tensor_maps_refusal). Every element of dq, dk and dv is written, also where there are no rows or
/// no keys.
Prepared prepare_backward(const Problem& p);

/// Every backward kernel in this build.
std::vector<KernelInfo> backward_kernels();

}  // namespace flashmask::sm90
