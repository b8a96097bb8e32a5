// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

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
  /// The call configured, or why the kernels do not take it, on a device that they run on.
  Prepared (*prepare)(const Problem& problem);
};

}  // namespace flashmask::cuda
