// SPDX-License-Identifier: Apache-2.0

// The one product of matrices: a panel of kWidth columns, held as vectors, times a matrix whose elements are broadcast.

// Included by tile_kernels.cpp, once for each instruction set.
#if defined(FLASHMASK_BACKENDS_CPU_MULTIPLY_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FLASHMASK_BACKENDS_CPU_MULTIPLY_INL_H_
#undef FLASHMASK_BACKENDS_CPU_MULTIPLY_INL_H_
#else
#define FLASHMASK_BACKENDS_CPU_MULTIPLY_INL_H_
#endif

#include <hwy/highway.h>

#include <cstdint>

#include "backends/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace flashmask::cpu::HWY_NAMESPACE {

/// How element (m, k) of the broadcast matrix lies in its rows.
enum class Order { kRows, kColumns };  // row m, column k; row k, column m

template <int kCount, Order kOrder>
HWY_INLINE void multiply_rows(Rows a, Rows panel, int64_t depth, bool accumulate, Rows result) {
  Vec sum0[kCount], sum1[kCount];
  for (int m = 0; m < kCount; ++m) sum0[m] = sum1[m] = hn::Zero(kFloats);
  const float* HWY_RESTRICT broadcast = a.at;
  const float* HWY_RESTRICT row = panel.at;
  for (int64_t k = 0; k < depth; ++k, row += panel.stride) {
    const Vec b0 = hn::Load(kFloats, row), b1 = hn::Load(kFloats, row + kLanes);
#pragma GCC unroll 16
    for (int m = 0; m < kCount; ++m) {
      const Vec x =
          hn::Set(kFloats, kOrder == Order::kRows ? broadcast[m * a.stride + k] : broadcast[k * a.stride + m]);
      sum0[m] = hn::MulAdd(x, b0, sum0[m]);
      sum1[m] = hn::MulAdd(x, b1, sum1[m]);
    }
  }
  for (int m = 0; m < kCount; ++m) {
    float* to = result.at + m * result.stride;  // a caller's dq has any alignment
    if (accumulate) {
      sum0[m] = hn::Add(hn::LoadU(kFloats, to), sum0[m]);
      sum1[m] = hn::Add(hn::LoadU(kFloats, to + kLanes), sum1[m]);
    }
    hn::StoreU(sum0[m], kFloats, to);
    hn::StoreU(sum1[m], kFloats, to + kLanes);
  }
}

template <int kCount, Order kOrder>
void multiply_rest(int64_t count, Rows a, Rows panel, int64_t depth, bool accumulate, Rows result) {
  if constexpr (kCount > 0) {
    if (count == kCount) {
      multiply_rows<kCount, kOrder>(a, panel, depth, accumulate, result);
    } else {
      multiply_rest<kCount - 1, kOrder>(count, a, panel, depth, accumulate, result);
    }
  }
}

/// Over the kWidth columns of `panel`: row m of result = (accumulate ? itself : 0) + sum over k < depth of a(m, k) *
/// row k of panel. The order of the sum over k is ascending and the same for every row, so a result never depends on
/// the rows beside it. What is there is added last: over many tiles, sums of tiles round off less than one sum would.
template <Order kOrder>
void multiply(int64_t count, Rows a, Rows panel, int64_t depth, bool accumulate, Rows result) {
  const int64_t step = kOrder == Order::kRows ? a.stride : 1;
  for (; count >= kBroadcast; count -= kBroadcast) {
    multiply_rows<kBroadcast, kOrder>(a, panel, depth, accumulate, result);
    a.at += kBroadcast * step;
    result.at += kBroadcast * result.stride;
  }
  multiply_rest<kBroadcast - 1, kOrder>(count, a, panel, depth, accumulate, result);
}

}  // namespace flashmask::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // the toggle of FLASHMASK_BACKENDS_CPU_MULTIPLY_INL_H_
