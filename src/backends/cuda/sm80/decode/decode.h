// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <vector>

#include "call/cached_launch.h"
#include "call/launch.h"

namespace flashmask::sm80 {

/// A call over a cache on a device whose blocks may have kKilobytes of shared memory, one of kLargeKilobytes and
/// kSmallKilobytes, or why the kernels do not take it.
template <int kKilobytes>
PreparedCached prepare_cached(const CachedProblem& problem);

/// Bytes of a plan on such a device, and how it is filled.
template <int kKilobytes>
std::size_t cached_plan_bytes(const CachedCapacities& capacities, const Device& device);
template <int kKilobytes>
void build_cached_plan(const CachedProblem& problem, const CachedPlan& plan);

/// Every decode kernel in this build.
std::vector<KernelInfo> decode_kernels();

}  // namespace flashmask::sm80
