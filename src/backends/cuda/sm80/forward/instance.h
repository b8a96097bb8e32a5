// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/device/variant.h"
#include "flashmask/data_type.h"

namespace flashmask::sm80 {

/// A kernel over tiles: void (*)(ForwardParams), or, for a variant with features, void (*)(FeaturedForwardParams). The
/// build defines it from instance.cu.in, for each element type, row of kForwardTiles and row of kForwardVariants for
/// that tile.
template <DataType dtype, int head_dim, int head_dim_v, int kilobytes, int variant>
cuda::CompiledKernel forward_kernel();

}  // namespace flashmask::sm80
