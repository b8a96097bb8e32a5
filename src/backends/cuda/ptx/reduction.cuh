// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/ptx/address.cuh"

namespace flashmask::ptx {

/// PTX ISA, "red" of a vector: adds four floats to the four at `global`, a multiple of 16 bytes. Each addition by
/// itself is atomic on the device.
__device__ __forceinline__ void add_four(float* global, const float* values) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(global_address(global)),
               "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3])
               : "memory");
}

}  // namespace flashmask::ptx
