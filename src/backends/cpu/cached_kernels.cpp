// SPDX-License-Identifier: Apache-2.0

// SVE's vectors cannot be in arrays: tile_kernels.cpp says more.
#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#endif

// The order of these matters.
// clang-format off
#include "backends/cpu/cached_kernels.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/cpu/cached_kernels.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
#include "backends/cpu/cached-inl.h"
#include "backends/cpu/split_forward-inl.h"
// clang-format on

#include <algorithm>
#include <cmath>
#include <limits>

#include "call/sink_and_dropout.h"
#include "common/element.h"

#if HWY_ONCE
namespace flashmask::cpu {

HWY_EXPORT(cached_split);
HWY_EXPORT(fold_state);
HWY_EXPORT(cached_scratch_floats);
HWY_EXPORT(split_forward_rows);
HWY_EXPORT(split_forward_scratch_floats);

int64_t cached_scratch_floats(const CachedProblem& p) { return HWY_DYNAMIC_DISPATCH(cached_scratch_floats)(p); }
void cached_split(const CachedProblem& p, const Sequence& sequence, const PackedRows& rows, int64_t begin, int64_t end,
                  const SoftmaxState& state, float* scratch) {
  HWY_DYNAMIC_DISPATCH(cached_split)(p, sequence, rows, begin, end, state, scratch);
}
void fold_state(const SoftmaxState& to, const SoftmaxState& split, int64_t rows, int64_t head_dim_v) {
  HWY_DYNAMIC_DISPATCH(fold_state)(to, split, rows, head_dim_v);
}

int64_t split_forward_scratch_floats(const CachedProblem& p) {
  return HWY_DYNAMIC_DISPATCH(split_forward_scratch_floats)(p);
}
int64_t split_forward_rows(const Problem& forward, const CachedProblem& p, int64_t b, int64_t h, int64_t r,
                           float* scratch) {
  return HWY_DYNAMIC_DISPATCH(split_forward_rows)(forward, p, b, h, r, scratch);
}

void store_rows(const CachedProblem& p, const Sequence& sequence, const PackedRows& rows, const SoftmaxState& state) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (int64_t n = 0; n < rows.total(); ++n) {
    const int64_t i = rows.row(n), h = rows.head(n);
    const auto sink = static_cast<float>(sink_of(p, h));
    const float largest = std::max(state.largest[n], sink);
    float lse = -kInf, factor = 0.0f;
    if (largest != -kInf) {
      const float of_keys = std::exp(state.largest[n] - largest);
      const float sum = state.sum[n] * of_keys + std::exp(sink - largest);
      lse = largest + std::log(sum);
      factor = of_keys / sum;
    }
    if (p.lse.defined()) static_cast<float*>(p.lse.data)[cached_lse_offset(p, rows.b, sequence.rows(), i, h)] = lse;
    TensorView row = p.out;
    row.data = p.out.dtype == DataType::kFloat32
                   ? static_cast<void*>(cached_row<float>(p, p.out, rows.b, sequence.rows(), i, h))
                   : static_cast<void*>(cached_row<uint16_t>(p, p.out, rows.b, sequence.rows(), i, h));
    for (int64_t c = 0; c < p.head_dim_v; ++c) store_element(row, c, factor * state.out[n * state.stride + c]);
  }
}

}  // namespace flashmask::cpu
#endif  // HWY_ONCE
