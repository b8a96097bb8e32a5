// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <vector>

#include "call/cached_launch.h"
#include "call/launch.h"
#include "call/problem.h"

namespace flashmask::cuda {

/// The attention kernels that are compiled for an architecture.
struct KernelSet {
  const char* name;   ///< "sm90": what Options::kernels asks for, and KernelInfo::arch of its kernels
  const char* needs;  ///< the compute capabilities it runs on, for messages: "9.0 (Hopper)"
  bool (*runs_on)(int major, int minor);
  /// Every kernel of it in this build.
  std::vector<KernelInfo> (*kernels)();
  bool takes_arrivals;  ///< its forward waits for keys that arrive, its backward has some keys' gradients early
  /// The call configured, or why the kernels do not take it, on a device that they run on.
  Prepared (*prepare)(const Problem& problem);

  // Calls over caches.

  /// True if calls of these capacities may have caches of e4m3.
  bool (*reads_float8)(const CachedCapacities& capacities);
  bool has_equal_bits;  ///< a row's bits do not depend on how many rows a call has, with batch_invariant
  PreparedCached (*prepare_cached)(const CachedProblem& problem);
  /// Bytes of a plan, and how it is filled, on a device that they run on.
  std::size_t (*cached_plan_bytes)(const CachedCapacities& capacities, const Device& device);
  void (*build_cached_plan)(const CachedProblem& problem, const CachedPlan& plan);
};

}  // namespace flashmask::cuda
