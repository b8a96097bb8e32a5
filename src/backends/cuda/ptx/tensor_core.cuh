// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/ptx/swizzle.cuh"

namespace flashmask::ptx {

/// PTX ISA, "wgmma: Matrix Descriptor": a tile in shared memory with the 128-byte swizzle, rows of 64 16-bit
/// elements, 1024-byte aligned groups of 8 rows. The high word is a literal, so only the low one takes work.
class MatrixDescriptor {
 public:
  /// `leading_bytes` is the distance between 64-element column blocks of an operand that is contiguous across the
  /// inner dimension; the others ignore it.
  __device__ __forceinline__ explicit MatrixDescriptor(uint32_t address, uint32_t leading_bytes = 16)
      : low_((address >> 4) | (leading_bytes >> 4) << 16) {}
  /// The descriptor that reads the tile from `bytes` further on.
  __device__ __forceinline__ uint64_t at(uint32_t bytes) const {
    constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
    return kSwizzle128 | uint64_t{Swizzle128::kPattern >> 4} << 32 | (low_ + (bytes >> 4));
  }

 private:
  uint32_t low_;
};

/// PTX ISA, "wgmma.fence": orders register accesses before the warpgroup's next wgmma.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
/// PTX ISA, "wgmma.commit_group".
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// PTX ISA, "wgmma.wait_group": until at most `kPending` of the newest groups are unfinished.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// PTX ISA, "stmatrix": four 8x8 16-bit matrices; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0), "r"(r1),
               "r"(r2), "r"(r3)
               : "memory");
}

/// stmatrix_x4 with `.trans`: of each matrix, lane l holds rows 2(l % 4) and 2(l % 4) + 1 of column l / 4.
__device__ __forceinline__ void stmatrix_x4_transposed(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2,
                                                       uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0),
               "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

}  // namespace flashmask::ptx
