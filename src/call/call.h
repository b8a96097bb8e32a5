// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "call/launch.h"
#include "call/problem.h"

namespace flashmask {

/// The launch of the backend that takes a call. Throws kUnsupported or kNoDevice, with every backend's reason, if none
/// does. `backend` as Options::backend.
Launch prepare(const Problem& problem, std::string_view backend);

/// The plan that the call makes, in bytes of its workspace.
int64_t plan_bytes(const Problem& problem, const Launch& launch);

/// A call that a backend takes, checked and configured once: for the size of its workspace and for its run.
class Call {
 public:
  /// Takes check()'s and prepare()'s arguments; the memory that they refer to has to outlive the call.
  template <typename Args>
  Call(const Args& args, const MaskView* mask, const Options& options, bool with_data)
      : problem_(check(args, mask, options, with_data)),
        launch_(prepare(problem_, options.backend)),
        plan_bytes_(plan_bytes(problem_, launch_)) {}
  /// The launch refers to the problem.
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  std::size_t workspace_bytes() const;
  /// Replaces the mask by its view with contents to be read. Throws if the call's plan is another mask's by its hash.
  void set_mask(const MaskView& mask);
  void run(std::span<std::byte> workspace);

 private:
  Problem problem_;
  Launch launch_;
  int64_t plan_bytes_;  ///< first in the workspace
};

/// Which backend would take the call, and how. Live tiles are -1 where the mask decides them: nothing of it is read.
Explanation explain_problem(const Problem& problem, std::string_view backend);

/// True if an explanation leaves live tiles to be counted, and the host can.
inline bool lacks_live_tiles(const Problem& problem, const Explanation& explanation) {
  return explanation.live_tiles < 0 && problem.mask.device.kind == Device::Kind::kCpu;
}

/// Counts the live tiles from the plan or from the mask's contents, which are there to be read.
void count_live_tiles(const Problem& problem, Explanation& explanation);

}  // namespace flashmask
