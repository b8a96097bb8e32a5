// SPDX-License-Identifier: Apache-2.0

// The tiled CPU kernels. One matrix product serves all of them: a panel of `kWidth` columns, held as vectors,
// is multiplied by a matrix whose elements are broadcast. In the forward a panel's columns are query rows, so that
// the softmax runs down the vectors without a horizontal step; in the backward, over key tiles, they are keys, and for
// dq its own columns. K, V, Q and dO are read once per tile into float32 rows padded to an odd number of cache
// lines, which keeps strided walks from falling into the same cache sets.

// The kernels keep vectors in arrays and structs, which SVE's types cannot be in, as their size is not known. NEON's
// are as wide on the CPUs of GH200 and GB200.
#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#endif

// The order of these matters.
// clang-format off
#include "backends/cpu/tile_kernels.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/cpu/tile_kernels.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
#include "backends/cpu/forward-inl.h"
#include "backends/cpu/backward-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace flashmask::cpu::HWY_NAMESPACE {

std::size_t scratch_floats(const Problem& p) {
  return static_cast<std::size_t>(
      (p.is_backward ? BackwardScratch(p, nullptr).parts : ForwardScratch(p, nullptr).parts).taken());
}

const char* target_name() { return hwy::TargetName(HWY_TARGET); }

}  // namespace flashmask::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flashmask::cpu {

HWY_EXPORT(forward_rows);
HWY_EXPORT(prepare_backward);
HWY_EXPORT(backward_keys);
HWY_EXPORT(store_dq);
HWY_EXPORT(scratch_floats);
HWY_EXPORT(target_name);

std::size_t scratch_bytes(const Problem& p) { return HWY_DYNAMIC_DISPATCH(scratch_floats)(p) * sizeof(float); }
int64_t forward_rows(const Problem& p, int64_t b, int64_t h, int64_t first, int64_t last, float* scratch) {
  return HWY_DYNAMIC_DISPATCH(forward_rows)(p, b, h, first, last, scratch);
}
void prepare_backward(const Problem& p, const BackwardRows& shared, int64_t b, int64_t h, int64_t r, float* scratch) {
  HWY_DYNAMIC_DISPATCH(prepare_backward)(p, shared, b, h, r, scratch);
}
int64_t backward_keys(const Problem& p, const BackwardRows& shared, int64_t b, int64_t hk, int64_t c, float* scratch) {
  return HWY_DYNAMIC_DISPATCH(backward_keys)(p, shared, b, hk, c, scratch);
}
void store_dq(const Problem& p, const BackwardRows& shared, int64_t b, int64_t h, int64_t r) {
  HWY_DYNAMIC_DISPATCH(store_dq)(p, shared, b, h, r);
}
const char* simd_target() { return HWY_DYNAMIC_DISPATCH(target_name)(); }

}  // namespace flashmask::cpu
#endif  // HWY_ONCE
