// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "mask/families/arguments.h"

namespace flashmask::cuda {

/// Bytes of scratch, of any alignment, that launch_mask_build needs.
int64_t mask_build_scratch(const build::Arguments& arguments);

/// Puts the build of a mask's vectors on the stream. Vectors, output and scratch are on the current device.
void launch_mask_build(const build::Arguments& arguments, const build::Output& output, std::byte* scratch,
                       cudaStream_t stream);

}  // namespace flashmask::cuda
