// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <span>
#include <string>

#include "backends/cuda/cache/cached_params.h"
#include "backends/cuda/cache/work_plan.h"
#include "call/cached_problem.h"
#include "call/problem.h"

namespace flashmask::cuda {

// A call over a cache, as far as it is one for the kernels of every architecture.

/// Live blocks of a share, as far as there are, and those of a multiprocessor where units lie in many shares: fewer
/// take longer to merge than to read.
inline constexpr int32_t kLeastBlocks = 1, kSplitBlocks = 2;

/// Why no kernel of tiles of so many packed rows takes the call whatever its head dims; empty if they may.
std::string cached_refusal(const CachedProblem& p, int32_t packed_rows = kPackedRows);

/// The call's device, head dims and scores, as calls over tensors have them.
Problem common_part(const CachedProblem& p);

/// The plan that a call has, or makes in its workspace.
WorkPlanLayout own_plan(const CachedProblem& p, const WorkPlaces& places);
WorkPlan plan_of(const CachedProblem& p, const WorkPlaces& places, std::byte* workspace);

/// Parameters of the kernels, which gather keys.
CachedParams cached_params(const CachedProblem& p, const WorkPlan& plan);

/// CTAs of a kernel for a call.
int64_t cached_ctas(const CachedProblem& p, const WorkPlaces& places);

/// The layout of plans with these capacities, in which some architecture's kernels have `places`; throws if no plan can
/// be that large.
WorkPlanLayout planned_layout(const CachedCapacities& capacities, const WorkPlaces& places);
/// Throws if no kernel has the capacities' head dims.
[[noreturn]] void throw_head_dims(const CachedCapacities& capacities);
/// Fills a plan; throws if its buffer is too small.
void build_plan(const CachedProblem& p, const CachedPlan& plan, const WorkPlanLayout& layout);

/// How shares are said in explanations.
std::string shares_text(const CachedProblem& p, const WorkPlaces& places);

}  // namespace flashmask::cuda
