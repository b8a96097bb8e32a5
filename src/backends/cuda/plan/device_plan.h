// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <vector>

#include "flashmask/attention.h"
#include "flashmask/mask.h"

namespace flashmask::cuda {

/// Enqueues the kernels that fill `buffer` (device memory, PlanLayout::bytes, 8-byte aligned) with the plan for
/// a mask with vectors in device memory: the bytes that build_plan writes on the host, including the hash of the
/// contents. The device must be the current one. Nothing is allocated, nothing synchronises, nothing need be in
/// `buffer` before, and a CUDA graph can capture it. The work is of the order of the plan's granules, and of the
/// squares of row granules and of key blocks for the orders.
///
/// Throws kInvalidArgument if the mask has vectors that are in host memory, kUnsupported if a kernel would need 2^31
/// blocks (about batch * heads * seqlen_q * seqlen_k = 2^57), kInternal if CUDA refuses a launch.
void launch_plan(const MaskView& mask, std::byte* buffer, cudaStream_t stream);

/// The kernels that launch_plan enqueues, in order; one of them only for masks with positions.
std::vector<KernelInfo> plan_kernels(bool has_positions);

}  // namespace flashmask::cuda
