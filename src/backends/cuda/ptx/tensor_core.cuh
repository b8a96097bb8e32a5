// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "backends/cuda/ptx/address.cuh"

namespace flashmask::ptx {

/// PTX ISA, "redux.sync": `x`, which is the same in all lanes. The result sits in a uniform register, so what is
/// worked out from it (addresses, descriptors, loop counts) takes no vector registers and no vector instructions.
__device__ __forceinline__ uint32_t uniform(uint32_t x) { return __reduce_or_sync(0xffffffff, x); }
__device__ __forceinline__ uint64_t uniform(uint64_t x) {
  return static_cast<uint64_t>(uniform(static_cast<uint32_t>(x >> 32))) << 32 | uniform(static_cast<uint32_t>(x));
}

/// The value that `x` has in lane 0, which alone reads it, in a uniform register.
template <typename T>
__device__ __forceinline__ T from_leader(const T& x) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  using Word = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
  return static_cast<T>(uniform(threadIdx.x % 32 == 0 ? static_cast<Word>(x) : Word{0}));
}

/// PTX ISA, "wgmma: Matrix Descriptor": a tile in shared memory with the 128-byte swizzle, rows of 64 16-bit
/// elements, 1024-byte aligned groups of 8 rows. The high word is a literal, so only the low one takes work.
class MatrixDescriptor {
 public:
  /// `leading_bytes` is the distance between 64-element column blocks of an operand that is contiguous across the
  /// inner dimension; the others ignore it.
  __device__ __forceinline__ explicit MatrixDescriptor(uint32_t address, uint32_t leading_bytes = 16)
      : low_((address >> 4) | (leading_bytes >> 4) << 16) {}
  /// The same tile, read from `bytes` further on.
  __device__ __forceinline__ uint64_t at(uint32_t bytes) const {
    constexpr uint64_t kStrideBytes = 1024, kSwizzle128 = uint64_t{1} << 62;
    return kSwizzle128 | (kStrideBytes >> 4) << 32 | (low_ + (bytes >> 4));
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
/// The same number; what follows from it is computed where it is used and not kept in registers.
__device__ __forceinline__ uint32_t opaque(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

/// Keeps the compiler from reading accumulators before the wait above this line.
template <int N>
__device__ __forceinline__ void pin(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

/// x = -inf if `visible` is 0: PTX ISA, "mov" under a predicate, in place. A selection by the compiler moves
/// accumulators about.
__device__ __forceinline__ void hide_unless(uint32_t visible, float& x) {
  asm volatile("{.reg .pred hidden; setp.eq.u32 hidden, %1, 0; @hidden mov.b32 %0, 0fFF800000;}"
               : "+f"(x)
               : "r"(visible));
}

/// PTX ISA, "stmatrix": four 8x8 16-bit matrices; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0), "r"(r1),
               "r"(r2), "r"(r3)
               : "memory");
}

/// The same with `.trans`: what lane l holds of a matrix are rows 2(l % 4) and 2(l % 4) + 1 of column l / 4.
__device__ __forceinline__ void stmatrix_x4_transposed(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2,
                                                       uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0),
               "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

/// PTX ISA, "cvt": two fp32 values to one register of two 16-bit ones, `low` in the low half.
template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t packed;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

/// PTX ISA, "ex2": 2^x, approximate, 0 for -inf.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace flashmask::ptx
