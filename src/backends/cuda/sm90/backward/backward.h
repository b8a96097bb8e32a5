// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "backends/problem.h"

namespace flashmask::sm90 {

/// What the backward kernels take, in words; empty if they take the call. Says nothing of TMA's wishes.
std::string backward_refusal(const Problem& p);

/// Tile, instance and kernels of a call that they take, from shapes and the device alone; see Explanation.
void describe_backward(const Problem& p, Explanation& e);

/// Every backward kernel in this build.
std::vector<KernelInfo> backward_kernels();

/// Bytes the call needs beside its plan, a multiple of 16.
std::size_t backward_workspace(const Problem& p);

/// Enqueues the gradients on p.stream; every element of dq, dk and dv is written, also where there are no rows or no
/// keys. `p.plan` is a plan in device memory (undefined in dense-mask mode); `workspace` is 256-byte aligned device
/// memory. Executed tiles are added up in *executed, a device counter, if it is not null.
void backward(const Problem& p, std::byte* workspace, unsigned long long* executed);

}  // namespace flashmask::sm90
