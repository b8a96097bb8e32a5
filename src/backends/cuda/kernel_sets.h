// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <variant>

#include "backends/cuda/host/kernel_set.h"

namespace flashmask::cuda {

/// The kernel sets in this build, the preferred first. An architecture is a line of this list.
std::span<const KernelSet* const> kernel_sets();

/// The kernel set of a call on a CUDA device: the one asked for, or the first for "auto" that its device (or
/// Problem::gpu) runs.
/// Throws kInvalidArgument if there is none of the name asked for.
std::variant<Refusal, const KernelSet*> kernel_set_for(const Problem& problem);

/// Likewise of a call over a cache, with its plan's capacities or its own. Unless kernels are asked for, a cache of
/// e4m3 goes to the first that read it.
std::variant<Refusal, const KernelSet*> cache_kernel_set_for(const Device& device, std::string_view wanted,
                                                             const CachedCapacities& capacities);

/// Why device `index` cannot run any kernel set; empty if it can.
std::string device_refusal(int32_t index);

/// The compute capabilities that some kernel set runs on, for messages.
std::string needed_capabilities();

}  // namespace flashmask::cuda
