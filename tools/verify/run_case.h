// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <string>

#include "flashmask/attention.h"
#include "flashmask/kv_cache.h"
#include "verify/any_case.h"
#include "verify/case.h"
#include "verify/case_masks.h"
#include "verify/check.h"

namespace flashmask::verify {

/// Functions under test; by default the library's own.
struct Implementation {
  std::function<void(const ForwardArgs&, std::span<std::byte>, const Options&)> forward = flashmask::forward;
  std::function<void(const BackwardArgs&, std::span<std::byte>, const Options&)> backward = flashmask::backward;
  std::function<void(const CachedForwardArgs&, std::span<std::byte>, const Options&)> cached_forward =
      flashmask::cached_forward;
};

struct RunOptions {
  /// The backend under test.
  std::string backend = "cpu";
  /// Threads of the run with the mask; the run with the dense mask takes one, so that comparing their bits
  /// also shows that threads change nothing.
  int threads = 2;
  /// Dense mask for the oracle and the dense run; by default the case's own. A test puts an independent rule here.
  std::function<DenseMask(const Case&)> dense{};
  Implementation implementation{};
};

/// Runs a case forward and backward, with its mask and with the dense one, and checks: accuracy against the
/// oracle, equal bits in both runs, executed tiles equal to the live ones in both directions, and that
/// nothing was written but the outputs and the workspace (both poisoned beforehand). An exception on the way is a
/// failure too. The backend "cuda" gets copies of everything on CUDA device 0, runs twice with the mask to be
/// compared bit for bit, and skips calls that it does not take: Verdict::skipped, or forward_only for the backward.
Verdict run_case(const Case& c, const RunOptions& options);
Verdict run_case(const Case& c, const RunOptions& options, const DenseMask& dense);

/// Runs a call over a cache and checks: accuracy against an oracle of its own, equal bits wherever its pages lie,
/// beside no other request, with a plan, for any number of threads and for the last row alone, that it writes its rows
/// and nothing else, what validate_cached and explain_cached say of it, and that append_kv makes the same cache. A
/// backend that takes no caches skips it.
Verdict run_case(const CachedCase& c, const RunOptions& options);
Verdict run_case(const AnyCase& c, const RunOptions& options);

/// Runs many cases, `jobs` at a time (0: one for each core), the most expensive first. `done` is called once
/// for each, from any thread but never twice at a time.
using CaseDone = std::function<void(std::size_t index, const Verdict& verdict)>;
void run_cases(std::span<const Case> cases, const RunOptions& options, int jobs, const CaseDone& done);
void run_cases(std::span<const AnyCase> cases, const RunOptions& options, int jobs, const CaseDone& done);

}  // namespace flashmask::verify
