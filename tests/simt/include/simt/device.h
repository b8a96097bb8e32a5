// SPDX-License-Identifier: Apache-2.0
#pragma once

// nvcc's built-ins for device code, included before everything else in sources of kernels that the host's compiler
// compiles. The toolkit's headers come first and see a host compiler, the library's then see __CUDACC__. __CUDA_ARCH__
// stays undefined: code for it alone is inline assembly, or has a form for the host beside it.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <vector_functions.h>
#include <vector_types.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "simt/machine.h"

#undef __device__
#undef __host__
#undef __global__
#undef __constant__
#undef __shared__
#undef __forceinline__
#undef __launch_bounds__
#undef __grid_constant__
#define __device__
#define __host__
#define __global__
#define __constant__
// A block ends before the thread that runs it begins another.
#define __shared__ static thread_local
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __CUDACC__ 1

extern constinit thread_local uint3 threadIdx, blockIdx;
extern constinit thread_local dim3 blockDim, gridDim;
inline constexpr int warpSize = 32;

// --- Arithmetic -----------------------------------------------------------------------------------

template <typename A, typename B>
concept SameKind = (std::integral<A> && std::integral<B>) || (std::floating_point<A> && std::floating_point<B>);

template <typename A, typename B>
  requires SameKind<A, B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::floating_point<T>) return std::fmin(static_cast<T>(a), static_cast<T>(b));
  return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(a) : static_cast<T>(b);
}
template <typename A, typename B>
  requires SameKind<A, B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::floating_point<T>) return std::fmax(static_cast<T>(a), static_cast<T>(b));
  return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
}

inline int __popc(unsigned x) { return std::popcount(x); }
inline int __popcll(unsigned long long x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __clzll(long long x) { return std::countl_zero(static_cast<unsigned long long>(x)); }
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1; }
inline int __ffsll(long long x) { return x == 0 ? 0 : std::countr_zero(static_cast<unsigned long long>(x)) + 1; }
inline unsigned __brev(unsigned x) {
  unsigned y = 0;
  for (int n = 0; n < 32; ++n) y |= (x >> n & 1) << (31 - n);
  return y;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = uint64_t{b} << 32 | a;
  unsigned result = 0;
  for (int n = 0; n < 4; ++n) {
    const unsigned s = selector >> 4 * n;
    unsigned byte = static_cast<unsigned>(bytes >> 8 * (s & 7)) & 0xff;
    if (s & 8) byte = byte & 0x80 ? 0xff : 0;
    result |= byte << 8 * n;
  }
  return result;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((uint64_t{high} << 32 | low) << (shift & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((uint64_t{high} << 32 | low) >> (shift & 31));
}
inline unsigned __funnelshift_lc(unsigned low, unsigned high, unsigned shift) {
  return shift >= 32 ? low : __funnelshift_l(low, high, shift);
}
inline unsigned __funnelshift_rc(unsigned low, unsigned high, unsigned shift) {
  return shift >= 32 ? high : __funnelshift_r(low, high, shift);
}
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(uint64_t{a} * b >> 32); }
inline int __vimax3_s32(int a, int b, int c) { return std::max({a, b, c}); }
inline int __vimin3_s32(int a, int b, int c) { return std::min({a, b, c}); }

inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1 / x; }
inline float __saturatef(float x) { return std::fmin(std::fmax(x, 0.0F), 1.0F); }
inline float __logf(float x) { return std::log(x); }
inline float __log2f(float x) { return std::log2(x); }
inline float __expf(float x) { return std::exp(x); }
/// Numbers out of range become the nearest integer, NaN 0.
inline int __float2int_rz(float x) {
  constexpr float kEnd = 0x1p31F;
  if (!(std::abs(x) < kEnd))
    return x > 0 ? std::numeric_limits<int>::max() : x < 0 ? std::numeric_limits<int>::min() : 0;
  return static_cast<int>(x);
}
inline int __float2int_rn(float x) { return __float2int_rz(std::nearbyint(x)); }
inline int __float2int_rd(float x) { return __float2int_rz(std::floor(x)); }
inline int __float2int_ru(float x) { return __float2int_rz(std::ceil(x)); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }

// --- Memory. A thread goes on until it waits, so what it does to memory is atomic. ----------------

template <typename T>
T __ldg(const T* p) {
  return *p;
}
template <typename T>
T __ldcg(const T* p) {
  return *p;
}
template <typename T>
T __ldcs(const T* p) {
  return *p;
}
template <typename T>
void __stcg(T* p, std::type_identity_t<T> value) {
  *p = value;
}
template <typename T>
void __stcs(T* p, std::type_identity_t<T> value) {
  *p = value;
}

template <typename T>
T atomicAdd(T* p, std::type_identity_t<T> value) {
  const T old = *p;
  *p = old + value;
  return old;
}
template <typename T>
T atomicSub(T* p, std::type_identity_t<T> value) {
  const T old = *p;
  *p = old - value;
  return old;
}
template <typename T>
T atomicMax(T* p, std::type_identity_t<T> value) {
  const T old = *p;
  *p = std::max(old, value);
  return old;
}
template <typename T>
T atomicMin(T* p, std::type_identity_t<T> value) {
  const T old = *p;
  *p = std::min(old, value);
  return old;
}
template <typename T>
T atomicOr(T* p, std::type_identity_t<T> value) {
  const T old = *p;
  *p = old | value;
  return old;
}
template <typename T>
T atomicAnd(T* p, std::type_identity_t<T> value) {
  const T old = *p;
  *p = old & value;
  return old;
}
template <typename T>
T atomicExch(T* p, std::type_identity_t<T> value) {
  const T old = *p;
  *p = value;
  return old;
}
template <typename T>
T atomicCAS(T* p, std::type_identity_t<T> compare, std::type_identity_t<T> value) {
  const T old = *p;
  if (old == compare) *p = value;
  return old;
}
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void cudaGridDependencySynchronize() {}
inline void cudaTriggerProgrammaticLaunchCompletion() {}

inline std::size_t __cvta_generic_to_shared(const void* p, simt::Place place = simt::Place::current()) {
  return simt::shared_address(p, place);
}
inline std::size_t __cvta_generic_to_global(const void* p) { return reinterpret_cast<std::size_t>(p); }

// --- Barriers -------------------------------------------------------------------------------------

inline void __syncthreads(simt::Place place = simt::Place::current()) {
  simt::barrier("__syncthreads", 0, 0, true, place);
}
inline void __syncwarp(unsigned lanes = simt::kWholeWarp, simt::Place place = simt::Place::current()) {
  simt::meet("__syncwarp", lanes, place, nullptr, nullptr);
}
inline void __nanosleep(unsigned, simt::Place place = simt::Place::current()) { simt::pause("__nanosleep", place); }

// --- Collectives of a warp ------------------------------------------------------------------------

namespace simt {

/// A lane's value; the lane whose value it asks for; and the value that it gets.
template <typename T>
struct Shuffled {
  T value;
  int from;  ///< below 0: its own
};

template <typename T>
void shuffle(Operands operands) {
  T values[32];
  for (int lane = 0; lane < 32; ++lane) {
    if (operands[lane]) values[lane] = static_cast<Shuffled<T>*>(operands[lane])->value;
  }
  for (int lane = 0; lane < 32; ++lane) {
    if (!operands[lane]) continue;
    auto& own = *static_cast<Shuffled<T>*>(operands[lane]);
    if (own.from < 0) continue;
    // The value of a lane that takes no part is undefined.
    if (operands[own.from]) {
      own.value = values[own.from];
    } else {
      std::memset(&own.value, 0xff, sizeof(T));
    }
  }
}

template <typename T>
T shuffled(const char* what, unsigned lanes, T value, int from, Place place) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  Shuffled<T> own{value, from};
  meet(what, lanes, place, &own, shuffle<T>);
  return own.value;
}

inline int own_lane() { return static_cast<int>(threadIdx.x % 32); }

/// All lanes bring a value and get what `Function` makes of the first and each other one.
template <typename T, auto function>
void reduce(Operands operands) {
  T sum{};
  bool first = true;
  for (void* operand : operands) {
    if (!operand) continue;
    const T value = *static_cast<T*>(operand);
    sum = first ? value : static_cast<T>(function(sum, value));
    first = false;
  }
  for (void* operand : operands) {
    if (operand) *static_cast<T*>(operand) = sum;
  }
}

template <auto function, typename T>
T reduced(const char* what, unsigned lanes, T value, Place place) {
  meet(what, lanes, place, &value, reduce<T, function>);
  return value;
}

}  // namespace simt

template <typename T>
T __shfl_sync(unsigned lanes, T value, int from, int width = 32, simt::Place place = simt::Place::current()) {
  const int lane = simt::own_lane();
  return simt::shuffled("__shfl_sync", lanes, value, lane / width * width + from % width, place);
}
template <typename T>
T __shfl_xor_sync(unsigned lanes, T value, int with, int width = 32, simt::Place place = simt::Place::current()) {
  const int lane = simt::own_lane(), from = lane ^ with;
  return simt::shuffled("__shfl_xor_sync", lanes, value, from / width > lane / width ? -1 : from, place);
}
template <typename T>
T __shfl_up_sync(unsigned lanes, T value, unsigned by, int width = 32, simt::Place place = simt::Place::current()) {
  const int lane = simt::own_lane(), from = lane - static_cast<int>(by);
  return simt::shuffled("__shfl_up_sync", lanes, value, from < lane / width * width ? -1 : from, place);
}
template <typename T>
T __shfl_down_sync(unsigned lanes, T value, unsigned by, int width = 32, simt::Place place = simt::Place::current()) {
  const int lane = simt::own_lane(), from = lane + static_cast<int>(by);
  return simt::shuffled("__shfl_down_sync", lanes, value, from >= (lane / width + 1) * width ? -1 : from, place);
}

inline unsigned __ballot_sync(unsigned lanes, int predicate, simt::Place place = simt::Place::current()) {
  const unsigned own = predicate ? 1U << simt::own_lane() : 0;
  return simt::reduced<[](unsigned a, unsigned b) { return a | b; }>("__ballot_sync", lanes, own, place);
}
inline int __any_sync(unsigned lanes, int predicate, simt::Place place = simt::Place::current()) {
  return simt::reduced<[](int a, int b) { return a | b; }>("__any_sync", lanes, int{predicate != 0}, place);
}
inline int __all_sync(unsigned lanes, int predicate, simt::Place place = simt::Place::current()) {
  return simt::reduced<[](int a, int b) { return a & b; }>("__all_sync", lanes, int{predicate != 0}, place);
}
template <typename T>
T __reduce_add_sync(unsigned lanes, T value, simt::Place place = simt::Place::current()) {
  return simt::reduced<[](T a, T b) { return a + b; }>("__reduce_add_sync", lanes, value, place);
}
template <typename T>
T __reduce_min_sync(unsigned lanes, T value, simt::Place place = simt::Place::current()) {
  return simt::reduced<[](T a, T b) { return a < b ? a : b; }>("__reduce_min_sync", lanes, value, place);
}
template <typename T>
T __reduce_max_sync(unsigned lanes, T value, simt::Place place = simt::Place::current()) {
  return simt::reduced<[](T a, T b) { return b < a ? a : b; }>("__reduce_max_sync", lanes, value, place);
}
inline unsigned __reduce_or_sync(unsigned lanes, unsigned value, simt::Place place = simt::Place::current()) {
  return simt::reduced<[](unsigned a, unsigned b) { return a | b; }>("__reduce_or_sync", lanes, value, place);
}
inline unsigned __reduce_and_sync(unsigned lanes, unsigned value, simt::Place place = simt::Place::current()) {
  return simt::reduced<[](unsigned a, unsigned b) { return a & b; }>("__reduce_and_sync", lanes, value, place);
}
inline unsigned __reduce_xor_sync(unsigned lanes, unsigned value, simt::Place place = simt::Place::current()) {
  return simt::reduced<[](unsigned a, unsigned b) { return a ^ b; }>("__reduce_xor_sync", lanes, value, place);
}

namespace simt {

template <typename T>
struct Matched {
  T value;
  unsigned lanes;
};
template <typename T>
void match(Operands operands) {
  for (void* operand : operands) {
    if (!operand) continue;
    auto& own = *static_cast<Matched<T>*>(operand);
    own.lanes = 0;
    for (int lane = 0; lane < 32; ++lane) {
      if (operands[lane] && static_cast<Matched<T>*>(operands[lane])->value == own.value) own.lanes |= 1U << lane;
    }
  }
}

}  // namespace simt

template <typename T>
unsigned __match_any_sync(unsigned lanes, T value, simt::Place place = simt::Place::current()) {
  simt::Matched<T> own{value, 0};
  simt::meet("__match_any_sync", lanes, place, &own, simt::match<T>);
  return own.lanes;
}
template <typename T>
unsigned __match_all_sync(unsigned lanes, T value, int* alike, simt::Place place = simt::Place::current()) {
  simt::Matched<T> own{value, 0};
  simt::meet("__match_all_sync", lanes, place, &own, simt::match<T>);
  *alike = own.lanes == lanes;
  return *alike ? lanes : 0;
}
