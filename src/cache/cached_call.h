// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>

#include "call/cached_launch.h"
#include "call/cached_problem.h"

namespace flashmask {

/// A call over a cache that a backend takes, checked and configured once: for the size of its workspace and for its
/// run.
class CachedCall {
 public:
  /// The memory that the arguments refer to has to outlive the call.
  CachedCall(const CachedForwardArgs& args, const Options& options, bool with_data);

  std::size_t workspace_bytes() const;
  void run(std::span<std::byte> workspace);

 private:
  CachedProblem problem_;
  CachedLaunch launch_;
};

}  // namespace flashmask
