// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/host/kernel_set.h"

namespace flashmask::sm90 {

/// Hopper's.
extern const cuda::KernelSet kKernelSet;

}  // namespace flashmask::sm90
