// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <vector>

#include "call/cached_launch.h"
#include "call/launch.h"

namespace flashmask::sm90 {

/// A call over a cache, or why the kernels do not take it.
PreparedCached prepare_cached(const CachedProblem& problem);

/// True if the kernels read caches of e4m3 in calls of these capacities.
bool reads_float8(const CachedCapacities& capacities);

/// Bytes of a plan on a device, and how it is filled.
std::size_t cached_plan_bytes(const CachedCapacities& capacities, const Device& device);
void build_cached_plan(const CachedProblem& problem, const CachedPlan& plan);

/// Every decode kernel in this build.
std::vector<KernelInfo> decode_kernels();

}  // namespace flashmask::sm90
