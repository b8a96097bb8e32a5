// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "backends/launch.h"
#include "backends/problem.h"

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

/// The kernel sets in this build, the preferred first. An architecture is a line of this list.
std::span<const KernelSet* const> kernel_sets();

/// The kernel set of a call on a CUDA device: the one asked for, or the first for "auto" that its device (or
/// Problem::gpu) runs.
/// Throws kInvalidArgument if there is none of the name asked for.
std::variant<Refusal, const KernelSet*> kernel_set_for(const Problem& problem);

/// Why device `index` cannot run any kernel set; empty if it can.
std::string device_refusal(int32_t index);

/// The compute capabilities that some kernel set runs on, for messages.
std::string needed_capabilities();

}  // namespace flashmask::cuda
