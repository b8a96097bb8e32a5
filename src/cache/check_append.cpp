// SPDX-License-Identifier: Apache-2.0
#include "cache/check_cache.h"
#include "call/requirements.h"
#include "common/message.h"
#include "common/tensor_checks.h"

namespace flashmask {
namespace {

/// Rows that slots alone place: they belong to no request.
bool are_loose(const AppendArgs& args) {
  return args.slots.defined() && !args.cu_seqlens.defined() && args.k.rank == 3;
}

/// True if rows have the dimensions [rows, ..] instead of [batch, rows, ..].
bool are_packed(const AppendArgs& args) { return args.cu_seqlens.defined() || are_loose(args); }

void check_k(const AppendArgs& args) {
  const TensorView& k = args.k;
  if (k.rank != (are_packed(args) ? 3 : 4))
    throw_invalid(
        "k is ", describe(k),
        "; it must be [batch, rows, heads_kv, head_dim], or [rows, heads_kv, head_dim] with cu_seqlens or slots");
  check_extent("k", k);
  if (k.dtype != DataType::kFloat32 && k.dtype != DataType::kFloat64 && k.dtype != DataType::kBFloat16 &&
      k.dtype != DataType::kFloat16)
    throw_invalid("k is ", describe(k), "; accepted dtypes are float32, bfloat16, float16 and float64");
}

/// The mask without the parts that no append reads, which are unchecked.
SequenceMaskView bounds_mask(const SequenceMaskView& mask) {
  return {.causal = mask.causal, .bounds = mask.bounds, .key_layout = mask.key_layout};
}

/// The sizes of the rows and of the cache.
CachedProblem read_sizes(const AppendArgs& args, const Options& options) {
  CachedProblem p;
  p.device = args.k.device;
  p.stream = options.stream;
  p.q = args.k;
  p.cu_seqlens_q = args.cu_seqlens;
  p.cache = args.cache;
  p.mask = bounds_mask(args.mask);
  const int32_t rank = args.k.rank;
  p.dtype = args.k.dtype;
  p.rows = args.k.shape[rank - 3];
  // k is checked against the cache's.
  p.heads_q = args.cache.k.rank == 4 ? args.cache.k.shape[2] : 1;
  p.head_dim = args.cache.k.rank == 4 ? args.cache.k.shape[3] : 1;
  if (p.is_packed()) check_cu_seqlens(p, "cu_seqlens", true);
  p.batch = p.is_packed() ? p.cu_seqlens_q.shape[0] - 1 : args.k.shape[0];
  if (are_loose(args)) {
    p.cache.page_table = p.cache.page_indptr = p.cache.page_indices = p.cache.seqlens = {};
    if (p.mask.key_layout == KeyLayout::kSequences) p.mask.bounds = {};  // its batch is that of calls
    p.batch = args.cache.k.rank == 4 ? args.cache.k.shape[0] : 0;
  }
  read_sequences(p, true);
  return p;
}

void check_rows(const AppendProblem& a, const char* argument, const TensorView& t, int64_t dim, const char* meaning) {
  const CachedProblem& p = a.call;
  if (a.k.rank == 3)
    check_tensor(argument, t, {{p.rows, p.heads_kv, dim}, meaning, p.dtype, true, false}, p.device, true);
  else
    check_tensor(argument, t, {{p.batch, p.rows, p.heads_kv, dim}, meaning, p.dtype, true, false}, p.device, true);
}

void check_slots(const AppendProblem& a) {
  const CachedProblem& p = a.call;
  if (!a.slots.defined()) {
    if (!p.cache.seqlens.defined()) throw_invalid("seqlens is absent; without slots it says which tokens the rows are");
    return;
  }
  const bool fits = a.k.rank == 3 ? has_shape(a.slots, {p.rows}) : has_shape(a.slots, {p.batch, p.rows});
  if (!fits || (a.slots.dtype != DataType::kInt64 && a.slots.dtype != DataType::kInt32))
    throw_invalid("slots is ", describe(a.slots), "; it must be int32 or int64, one for each row of k");
  check_readable(p, "slots", a.slots, true);
}

/// Throws if the rows' vectors have no place in the mask's.
void check_layout(const AppendArgs& args) {
  const SequenceMaskView& m = args.mask;
  if (args.bounds.defined() && m.bounds.defined() && args.slots.defined() && m.key_layout == KeyLayout::kSequences)
    throw_invalid("mask.bounds lies by sequences, and slots name places in the cache; lay it beside the pages",
                  are_loose(args) ? "" : ", or leave slots out");
}

void check_bounds(const AppendProblem& a) {
  if (!a.bounds.defined()) return;
  const CachedProblem& p = a.call;
  const TensorView& to = p.mask.bounds;
  if (!to.defined()) throw_invalid("bounds is ", describe(a.bounds), " and mask has none to write them to");
  const bool in_pages = p.mask.key_layout == KeyLayout::kPages;
  const int64_t heads = to.shape[in_pages ? 2 : 1], vectors = to.shape[3];
  const bool fits = a.k.rank == 3 ? has_shape(a.bounds, {p.rows, heads, vectors})
                                  : has_shape(a.bounds, {p.batch, p.rows, heads, vectors});
  check_int32(p, "bounds", a.bounds, true, fits, "[k's rows, ", heads, ", ", vectors,
              "], the heads and vectors of mask.bounds");
}

/// Tells what a scale is of that is to be written; throws if it is not there, or shared by pages.
WrittenScales written_scales(const CachedProblem& p, const char* argument, const TensorView& scale) {
  if (!scale.defined())
    throw_invalid("write_scales is set and ", argument, " is absent; it must be there, float32 [", p.pages, ", 1 or ",
                  p.page_size, ", 1 or ", p.heads_kv, "] (pages, page_size, heads_kv)");
  if (p.pages > 1 && scale.stride[0] == 0)
    throw_invalid("write_scales is set and ", argument,
                  " is shared by pages, whose keys are stored by it already; make such a scale before the first append "
                  "(scales_of in flashmask.inference) and leave write_scales out, or give float32 [",
                  p.pages, ", 1 or ", p.page_size, ", 1 or ", p.heads_kv, "] (pages, page_size, heads_kv)");
  return p.page_size > 1 && scale.stride[1] == 0 ? WrittenScales::kOfPages : WrittenScales::kOfTokens;
}

}  // namespace

AppendProblem check_append(const AppendArgs& args, const Options& options) {
  check_k(args);
  check_layout(args);
  AppendProblem a{
      .call = read_sizes(args, options), .k = args.k, .v = args.v, .slots = args.slots, .bounds = args.bounds};
  check_rows(a, "k", a.k, a.call.head_dim, "k's rows, cache.k's heads and head_dim");
  check_rows(a, "v", a.v, a.call.head_dim_v, "k's rows, cache.v's heads and head_dim");
  check_slots(a);
  check_bounds(a);
  if (args.write_scales) {
    a.k_scales = written_scales(a.call, "k_scale", a.call.cache.k_scale);
    a.v_scales = written_scales(a.call, "v_scale", a.call.cache.v_scale);
  }
  a.call.view = view_of(a.call);
  return a;
}

}  // namespace flashmask
