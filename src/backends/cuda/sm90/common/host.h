// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/sm90/common/mask_params.h"
#include "backends/problem.h"

namespace flashmask::sm90 {

/// Something of [batch or 1, heads, ...] for the call's batch entries and query heads.
Sharing sharing(const Problem& p, int64_t batch, int64_t heads);

/// What the kernels read of the call's mask, and of its dense mask if it has one.
MaskColumns mask_columns(const Problem& p);
DenseMask dense_mask(const Problem& p);

/// Lets a kernel have its dynamic shared memory; asks CUDA once per kernel and device.
void allow_shared_memory(const void* kernel, int bytes, int32_t device);

}  // namespace flashmask::sm90
