// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/host/kernel_set.h"

namespace flashmask::sm80 {

/// The kernels of mma.sync: for Ampere, Ada and, by PTX, every later architecture. The second set has only the smaller
/// tiles, for devices with less shared memory.
extern const cuda::KernelSet kKernelSet, kSmallKernelSet;

}  // namespace flashmask::sm80
