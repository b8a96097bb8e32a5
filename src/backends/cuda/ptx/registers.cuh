// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace flashmask::ptx {

/// The calling thread's place in its warp, and whether it acts for the warp where one lane has to.
__device__ __forceinline__ uint32_t lane() { return threadIdx.x % 32; }
__device__ __forceinline__ bool is_leader() { return lane() == 0; }
/// PTX ISA, "%laneid": the same place, read where it is needed and not kept in a register until then.
__device__ __forceinline__ uint32_t reload_lane() {
  uint32_t lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

/// PTX ISA, "redux.sync": `x`, which is the same in all lanes. The result sits in a uniform register, so values
/// computed from it (addresses, descriptors, loop counts) take no vector registers and no vector instructions.
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

/// PTX ISA, "ld.global.nc": element `index`, read where it is needed and again each time.
template <typename T>
__device__ __forceinline__ T load_here(const T* from, uint32_t index) {
  static_assert(sizeof(T) == 4);
  uint32_t x;
  asm volatile("{.reg .b64 at; mad.wide.u32 at, %1, 4, %2; ld.global.nc.b32 %0, [at];}"
               : "=r"(x)
               : "r"(index), "l"(from));
  return __builtin_bit_cast(T, x);
}

/// Hides `x` from the compiler: values derived from it are computed where they are used and not kept in registers.
__device__ __forceinline__ uint32_t opaque(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

/// Keeps `x` in a register: the compiler cannot recompute the result of a shuffle.
__device__ __forceinline__ uint32_t keep_in_register(uint32_t x) {
  return __shfl_sync(~0u, x, static_cast<int>(lane()));
}

/// Keeps the compiler from reading accumulators before the wait above this line.
template <int N>
__device__ __forceinline__ void pin(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

/// Zeros that stand where they are written: the compiler's own may live from loop to loop.
template <int N>
__device__ __forceinline__ void clear(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("mov.b32 %0, 0;" : "=f"(d[i]));
}

/// A copy of accumulators that can be read while other products are in flight: across a loop's iterations ptxas cannot
/// tell that a product has finished with the registers that it wrote, and would wait for all of them.
template <int N>
__device__ __forceinline__ void copy(const float* d, float (&to)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("mov.b32 %0, %1;" : "=f"(to[i]) : "f"(d[i]));
}

/// Sums of integers whose bits are in `a` and `b`, in other registers, as a copy.
template <int N>
__device__ __forceinline__ void add_integers(const float (&a)[N], const float (&b)[N], float (&sums)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i)
    asm volatile("{.reg .s32 a, b; mov.b32 a, %1; mov.b32 b, %2; add.s32 a, a, b; mov.b32 %0, a;}"
                 : "=f"(sums[i])
                 : "f"(a[i]), "f"(b[i]));
}

/// x = -inf if `visible` is 0: PTX ISA, "mov" under a predicate, in place. A selection by the compiler moves
/// accumulators about.
__device__ __forceinline__ void hide_unless(uint32_t visible, float& x) {
  asm volatile("{.reg .pred hidden; setp.eq.u32 hidden, %1, 0; @hidden mov.b32 %0, 0fFF800000;}"
               : "+f"(x)
               : "r"(visible));
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

/// x = 0 if `dropped` is not 0, in place, as hide_unless.
__device__ __forceinline__ void zero_if(uint32_t dropped, float& x) {
  asm volatile("{.reg .pred zero; setp.ne.u32 zero, %1, 0; @zero mov.b32 %0, 0f00000000;}" : "+f"(x) : "r"(dropped));
}

/// PTX ISA, "rcp": 1 / x, approximate.
__device__ __forceinline__ float inverse_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// PTX ISA, "tanh": approximate, relative error 2^-11.
__device__ __forceinline__ float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// PTX ISA, "add.cc", "addc": 2 * x, plus 1 if a + b has a carry.
__device__ __forceinline__ uint32_t double_plus_carry(uint32_t x, uint32_t a, uint32_t b) {
  asm("{.reg .u32 sum; add.cc.u32 sum, %1, %2; addc.u32 %0, %0, %0;}" : "+r"(x) : "r"(a), "r"(b));
  return x;
}

/// PTX ISA, "min": the smaller, or NaN if one of them is.
__device__ __forceinline__ float min_or_nan(float a, float b) {
  float least;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(a), "f"(b));
  return least;
}

/// PTX ISA, "ex2": 2^x, approximate, 0 for -inf.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace flashmask::ptx
