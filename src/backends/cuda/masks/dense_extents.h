// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "call/problem.h"
#include "flashmask/attention.h"
#include "flashmask/visible_extent.h"

namespace flashmask::cuda {

/// The id of the kernel that find_dense_extents launches.
inline constexpr const char* kDenseExtents = "sm90.masks.dense_extents";

/// Finds how far each batch entry's visible elements reach under the call's dense mask, which has no plan to say so, on
/// the call's stream. `extents`: [batch].
void find_dense_extents(const Problem& p, VisibleExtent* extents);

std::vector<KernelInfo> dense_extent_kernels();

}  // namespace flashmask::cuda
