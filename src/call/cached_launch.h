// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <variant>

#include "call/cached_problem.h"
#include "call/launch.h"

namespace flashmask {

/// A call over a cache that a backend takes; what else it needs follows from the problem again.
struct CachedLaunch {
  int64_t workspace_bytes;
  /// Sets kernel, splits and pages.
  void (*explain)(const CachedProblem&, CachedExplanation&);
  /// `workspace` is aligned to kWorkspaceAlignment, in the memory of the call's device. Some request has a row.
  void (*run)(const CachedProblem&, std::byte* workspace);
};

using PreparedCached = std::variant<Refusal, CachedLaunch>;

}  // namespace flashmask
