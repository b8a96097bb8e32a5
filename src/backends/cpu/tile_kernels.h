// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/problem.h"

namespace flashmask::cpu {

/// The tile every kernel works in is one granule of the plan.
inline constexpr int64_t kTileRows = kGranuleRows;
inline constexpr int64_t kTileKeys = kGranuleKeys;

/// Sum over a row of dout * out, less the gradient of lse: float32 [batch, heads_q, seqlen_q].
struct Delta {
  float* data = nullptr;
  float* row(const Problem& p, int64_t b, int64_t h) const { return data + (b * p.heads_q + h) * p.seqlen_q; }
};

/// Bytes of scratch one thread needs, a multiple of 64.
std::size_t scratch_bytes(const Problem& problem);

// One item of work each. `scratch` is aligned to 64 bytes; the functions return how many tiles they executed.

/// out and lse of row tile `r` of query head h.
int64_t forward_rows(const Problem& problem, int64_t b, int64_t h, int64_t r, float* scratch);
/// dq of row tile `r` of query head h; leaves the rows' entries of delta for backward_keys.
int64_t backward_rows(const Problem& problem, Delta delta, int64_t b, int64_t h, int64_t r, float* scratch);
/// dk and dv of key tile `c` of key head hk, summed over the query heads of its group, after all of their
/// backward_rows.
int64_t backward_keys(const Problem& problem, Delta delta, int64_t b, int64_t hk, int64_t c, float* scratch);

/// "AVX2", ...: the instruction set the kernels were dispatched to.
const char* simd_target();

}  // namespace flashmask::cpu
