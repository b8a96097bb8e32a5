// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/device/variant.h"
#include "flashmask/data_type.h"

namespace flashmask::sm90 {

/// A decode kernel: __global__ void (DecodeParams). The build makes a definition from instance.cu.in for each element
/// type, row of kDecodeTiles and variant.
template <DataType dtype, int head_dim, int head_dim_v, int consumers, int variant>
cuda::CompiledKernel decode_kernel();

}  // namespace flashmask::sm90
