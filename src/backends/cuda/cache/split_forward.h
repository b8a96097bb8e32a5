// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/host/kernel_set.h"
#include "call/launch.h"

namespace flashmask::cuda {

/// A forward with split_size by a set's kernels over caches, which have the bits of calls over caches; or why they do
/// not take it.
Prepared prepare_split_forward(const KernelSet& set, const Problem& problem);

}  // namespace flashmask::cuda
