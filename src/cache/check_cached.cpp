// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <utility>

#include "cache/check_cache.h"
#include "call/cached_problem.h"
#include "call/options.h"
#include "call/requirements.h"
#include "common/arithmetic.h"
#include "common/message.h"
#include "common/tensor_checks.h"
#include "flashmask/mask.h"

namespace flashmask {
namespace {

/// Reads batch, rows, heads and head_dim off q and cu_seqlens_q.
void read_rows(CachedProblem& p) {
  const int32_t rank = p.is_packed() ? 3 : 4;
  if (p.q.rank != rank)
    throw_invalid("q is ", describe(p.q), "; it must have ", rank, " dimensions, ",
                  p.is_packed() ? "[rows, heads_q, head_dim] beside cu_seqlens_q"
                                : "[batch, rows, heads_q, head_dim] without cu_seqlens_q");
  check_extent("q", p.q);
  p.dtype = p.q.dtype;
  p.device = p.q.device;
  p.heads_q = p.q.shape[rank - 2];
  p.head_dim = p.q.shape[rank - 1];
  p.rows = p.q.shape[rank - 3];
  p.batch = p.is_packed() ? p.cu_seqlens_q.shape[0] - 1 : p.q.shape[0];
}

void check_tail(const CachedProblem& p, bool with_data) {
  const SequenceMaskView& m = p.mask;
  if (!m.tail.defined()) {
    for (const auto& [argument, t] :
         {std::pair<const char*, const TensorView&>{"tail_lens", m.tail_lens}, {"tail_depth", m.tail_depth}}) {
      if (t.defined()) throw_invalid(argument, " is ", describe(t), "; it must be absent without tail");
    }
    return;
  }
  const TensorView& t = m.tail;
  // The bits say how many rows there may be; T is the second dimension.
  const bool fits = t.rank == 3 && t.shape[0] == p.batch && t.shape[1] >= 0 && t.shape[1] <= kMaxTail &&
                    t.shape[2] == ceil_div(t.shape[1], 32);
  check_int32(p, "tail", t, with_data, fits, "[", p.batch, ", T, ceil(T / 32)], T at most ", kMaxTail);
  if (m.tail_lens.defined())
    check_int32(p, "tail_lens", m.tail_lens, with_data, has_shape(m.tail_lens, {p.batch}), "[", p.batch, "]");
  if (m.tail_depth.defined())
    check_int32(p, "tail_depth", m.tail_depth, with_data, has_shape(m.tail_depth, {p.batch, t.shape[1]}), "[", p.batch,
                ", ", t.shape[1], "], the tail's");
}

void check_positions(const CachedProblem& p, bool with_data) {
  const SequenceMaskView& m = p.mask;
  if (m.k_pos.defined() && !m.q_pos.defined())
    throw_invalid("k_pos is ", describe(m.k_pos), " and q_pos absent; where keys have positions, rows have them, too");
  if (!m.q_pos.defined()) return;
  if (m.tail_depth.defined())
    throw_invalid("tail_depth and q_pos are both given; one of them says the positions of the tail");
  if (m.tail.defined() && !m.k_pos.defined())
    throw_invalid("q_pos is given beside a tail and k_pos is not; give both, or tail_depth");
  if (p.is_packed())
    check_int32(p, "q_pos", m.q_pos, with_data, has_shape(m.q_pos, {p.rows}), "[", p.rows, "]");
  else
    check_int32(p, "q_pos", m.q_pos, with_data, has_shape(m.q_pos, {p.batch, p.rows}), "[", p.batch, ", ", p.rows, "]");
  if (!m.k_pos.defined()) return;
  const TensorView& t = m.k_pos;
  if (m.key_layout == KeyLayout::kPages)
    check_int32(p, "k_pos", t, with_data, has_shape(t, {p.pages, p.page_size}), "[", p.pages, ", ", p.page_size, "]");
  else
    check_int32(p, "k_pos", t, with_data, t.rank == 2 && is_one_of(t.shape[0], {1, p.batch}), "[1 or ", p.batch,
                ", columns]");
}

void check_outputs(const CachedProblem& p, bool with_data) {
  const DataType lse = p.dtype == DataType::kFloat64 ? DataType::kFloat64 : DataType::kFloat32;
  if (p.is_packed()) {
    check_tensor("out", p.out, {{p.rows, p.heads_q, p.head_dim_v}, "rows, heads_q, head_dim_v", p.dtype, true, true},
                 p.device, with_data);
    if (p.lse.defined())
      check_tensor("lse", p.lse, {{p.heads_q, p.rows}, "heads_q, rows", lse, false, true}, p.device, with_data);
    return;
  }
  check_tensor("out", p.out,
               {{p.batch, p.rows, p.heads_q, p.head_dim_v}, "batch, rows, heads_q, head_dim_v", p.dtype, true, true},
               p.device, with_data);
  if (p.lse.defined())
    check_tensor("lse", p.lse, {{p.batch, p.heads_q, p.rows}, "batch, heads_q, rows", lse, false, true}, p.device,
                 with_data);
}

void refuse_features(const Features& features) {
  if (features.dropout.p != 0)
    throw_unsupported("dropout_p is ", features.dropout.p,
                      "; a call over a cache has no dropout: train with forward and backward");
  if (features.partial_out)
    throw_unsupported("partial_out is set; a call over a cache has out in q's dtype: merge by lse (merge_attention)");
  if (features.split_size != 0)
    throw_unsupported("the options' split_size is ", features.split_size,
                      "; a call over a cache has split_size among its own arguments");
}

void check_split_size(int64_t split_size) {
  if (!is_split_size(split_size)) throw_invalid("split_size is ", split_size, "; it must be a multiple of 128");
}

}  // namespace

CachedProblem check_cached(const CachedForwardArgs& args, const Options& options, bool with_data) {
  check_options(options);
  refuse_features(options.features);
  check_split_size(args.split_size);
  CachedProblem p;
  p.kernels = options.kernels;
  p.batch_invariant = args.batch_invariant;
  p.split_size = args.split_size;
  p.q = args.q;
  p.out = args.out;
  p.lse = args.lse;
  p.cu_seqlens_q = args.cu_seqlens_q;
  p.cache = args.cache;
  p.mask = args.mask;
  p.plan = args.plan;
  check_q_dtype(p.q);
  read_rows(p);
  if (p.is_packed()) check_cu_seqlens(p, "cu_seqlens_q", with_data);
  check_strides("q", p.q, true, false);
  if (with_data) check_data("q", p.q);
  read_sequences(p, with_data);
  check_tail(p, with_data);
  check_positions(p, with_data);
  check_outputs(p, with_data);
  read_options(options, p.head_dim, p);
  check_tensor_options(p.features, p.batch, p.heads_q, p.dtype, p.device, with_data);
  p.view = view_of(p);
  return p;
}

}  // namespace flashmask
