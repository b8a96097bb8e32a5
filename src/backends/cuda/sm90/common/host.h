// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "backends/cuda/attention/features.h"
#include "backends/cuda/attention/mask_params.h"
#include "backends/problem.h"

namespace flashmask::sm90 {

using cuda::DenseMask, cuda::MaskColumns, cuda::Sharing;

/// Something of [batch or 1, heads, ...] for the call's batch entries and query heads.
Sharing sharing(const Problem& p, int64_t batch, int64_t heads);

/// The element types that there are kernels of.
inline constexpr DataType kDataTypes[] = {DataType::kBFloat16, DataType::kFloat16};

/// What the ids of the kernels begin with.
inline constexpr const char* kArch = "sm90";

/// Why the kernels cannot count the rows or keys of the call in 32 bits; empty if they can.
std::string lengths_refusal(const Problem& p);

/// Multiprocessors of the call's device.
int64_t multiprocessors(const Problem& p);

/// How many CTAs of a persistent kernel the call may have.
int64_t most_ctas(const Problem& p);

/// What the kernels read of the call's mask, and of its dense mask if it has one.
MaskColumns mask_columns(const Problem& p);
DenseMask dense_mask(const Problem& p);

/// Whether the call needs the kernels of features.
bool asks_for_features(const Problem& p);
/// What those read of its features.
cuda::FeatureParams feature_params(const Problem& p);

/// Lets a kernel have its dynamic shared memory; asks CUDA once per kernel and device.
void allow_shared_memory(const void* kernel, int bytes, int32_t device);

}  // namespace flashmask::sm90
