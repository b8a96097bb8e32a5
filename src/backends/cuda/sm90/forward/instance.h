// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/device/variant.h"
#include "flashmask/data_type.h"

namespace flashmask::sm90 {

/// A kernel over tiles: __global__ void (ForwardParams), or, for a variant with features, of a type derived from it.
/// The build makes a definition from instance.cu.in for each element type, row of kForwardTiles and row of
/// kForwardVariants that fits the tile.
template <DataType dtype, int head_dim, int head_dim_v, int consumers, int variant>
cuda::CompiledKernel forward_kernel();

}  // namespace flashmask::sm90
