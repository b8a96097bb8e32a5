// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/host/dq_magnitudes.h"

#include "backends/cuda/host/call_params.h"
#include "common/arithmetic.h"

namespace flashmask::cuda {
namespace {

int64_t head_blocks(const Problem& p) { return ceil_div(p.seqlen_k, int64_t{KeyMagnitudeParams::kKeys}); }

}  // namespace

int64_t magnitude_blocks(const Problem& p) {
  return p.deterministic && p.seqlen_q > 0 ? p.batch * p.heads_kv * head_blocks(p) : 0;
}

KeyMagnitudeParams key_magnitude_params(const Problem& p, KeyMagnitudes* magnitudes, const VisibleExtents& extents) {
  return {.k = tensor_rows(p.k),
          .v = tensor_rows(p.v),
          .magnitudes = magnitudes,
          .extents = extents,
          .seqlen_k = static_cast<int32_t>(p.seqlen_k),
          .blocks = static_cast<uint32_t>(head_blocks(p)),
          .heads = static_cast<uint32_t>(p.heads_kv)};
}

RowScaleParams row_scale_params(const Problem& p, const KeyMagnitudes* magnitudes) {
  if (!magnitudes) return {};
  return {.magnitudes = magnitudes,
          .blocks = static_cast<uint32_t>(head_blocks(p)),
          .heads = static_cast<uint32_t>(p.heads_kv),
          .query_heads_per_key_head = static_cast<uint32_t>(p.group_size()),
          .kept_scale = feature_params(p).dropout.scale};
}

}  // namespace flashmask::cuda
