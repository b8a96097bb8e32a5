// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "backends/problem.h"

namespace flashmask::sm90 {

/// What the forward kernels take, in words; empty if they take the call.
std::string forward_refusal(const Problem& p);

/// Tile, instance and kernels of a call that they take, from shapes and the device alone; see Explanation.
void describe_forward(const Problem& p, Explanation& e);

/// Every forward kernel in this build.
std::vector<KernelInfo> forward_kernels();

/// Bytes the call needs beside its plan, a multiple of 16.
std::size_t forward_workspace(const Problem& p);

/// Enqueues the forward pass on p.stream. `p.plan` is a plan in device memory (undefined in dense-mask
/// mode); `workspace` is 16-byte aligned device memory. Executed tiles are added up in *executed, a device
/// counter, if it is not null.
void forward(const Problem& p, std::byte* workspace, unsigned long long* executed);

}  // namespace flashmask::sm90
