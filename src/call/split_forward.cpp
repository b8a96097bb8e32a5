// SPDX-License-Identifier: Apache-2.0
#include "call/split_forward.h"

#include <cstdint>

namespace flashmask {
namespace {

/// A mask's positions [own batch, length] by batch entry and index.
Int32Elements<2> positions(const int32_t* data, int64_t own_batch, int64_t length) {
  return {data, {own_batch == 1 ? 0 : length, 1}};
}

}  // namespace

CachedProblem as_cached(const Problem& p) {
  CachedProblem c;
  static_cast<CommonOptions&>(c) = static_cast<const CommonOptions&>(p);
  c.batch = p.batch;
  c.heads_q = p.heads_q;
  c.heads_kv = p.heads_kv;
  c.head_dim = p.head_dim;
  c.head_dim_v = p.head_dim_v;
  c.rows = p.seqlen_q;
  c.capacity = c.page_size = p.seqlen_k;
  c.pages = p.batch;
  c.dtype = c.cache_dtype = p.dtype;
  c.device = p.device;
  c.gpu = p.gpu;
  c.split_size = p.features.split_size;
  c.q = p.q;
  c.out = p.out;
  c.lse = p.lse;
  c.cache.k = p.k;
  c.cache.v = p.v;
  c.view = view_of(c);
  if (!p.mask.has_positions) return c;
  c.view.q_pos = positions(p.mask.q_pos, p.mask.q_pos_batch, p.seqlen_q);
  c.view.k_pos = positions(p.mask.k_pos, p.mask.k_pos_batch, p.seqlen_k);
  c.view.position_columns = p.seqlen_k;
  return c;
}

}  // namespace flashmask
