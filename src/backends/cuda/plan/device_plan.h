// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <vector>

#include "flashmask/attention.h"
#include "flashmask/mask.h"
#include "flashmask/plan.h"

namespace flashmask::cuda {

/// Enqueues the kernels that fill `buffer` (device memory, PlanLayout::bytes, 8-byte aligned) with the plan for
/// a mask with vectors in device memory: the bytes that build_plan writes on the host, including the hash of the
/// contents. The device must be the current one. Nothing is allocated, nothing synchronises, nothing need be in
/// `buffer` before, and a CUDA graph can capture it. The work is of the order of the plan's granules, and of the
/// squares of row granules and of key blocks for the orders; with interval lists of these, too. Bit tiles that `layout`
/// has no room for are counted, and not written. In runs no bits of all granules are in memory, not even for a while.
///
/// Throws kInvalidArgument if the mask has vectors that are in host memory, kUnsupported if a kernel would need 2^31
/// blocks (about batch * heads * seqlen_q * seqlen_k = 2^57), kInternal if CUDA refuses a launch.
void launch_plan(const MaskView& mask, const PlanLayout& layout, std::byte* buffer, cudaStream_t stream);
/// In the layout with room for all tiles that there can be.
void launch_plan(const MaskView& mask, std::byte* buffer, cudaStream_t stream);

/// The parts of a mask that decide on the planner's kernels.
struct PlanVariant {
  bool lists = false, positions = false, runs = false;
};

/// The kernels that launch_plan enqueues, in order.
std::vector<KernelInfo> plan_kernels(PlanVariant variant);

}  // namespace flashmask::cuda
