// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <initializer_list>

#include "call/options.h"
#include "call/problem.h"
#include "call/requirements.h"
#include "common/arithmetic.h"
#include "common/message.h"
#include "common/tensor_checks.h"
#include "mask/host_only.h"
#include "mask/mask_tensors.h"

namespace flashmask {
namespace {

/// Reads the sizes off q, k and v; everything else is checked against them.
void read_sizes(Problem& p) {
  for (const auto& [argument, t] : {std::pair<const char*, const TensorView&>{"q", p.q}, {"k", p.k}, {"v", p.v}}) {
    if (t.rank != 4)
      throw_invalid(argument, " is ", describe(t), "; it must have 4 dimensions, [batch, seqlen, heads, head_dim]");
    check_extent(argument, t);
  }
  p.dtype = p.q.dtype;
  p.device = p.q.device;
  p.batch = p.q.shape[0];
  p.seqlen_q = p.q.shape[1];
  p.heads_q = p.q.shape[2];
  p.head_dim = p.q.shape[3];
  p.seqlen_k = p.k.shape[1];
  p.heads_kv = p.k.shape[2];
  p.head_dim_v = p.v.shape[3];
  check_q_dtype(p.q);
  for (const auto& [argument, n] :
       {std::pair{"seqlen_q (q's dimension 1)", p.seqlen_q}, {"seqlen_k (k's dimension 1)", p.seqlen_k}}) {
    if (n > kMaxSeqlen) throw_invalid(argument, " is ", n, "; it must be at most ", kMaxSeqlen);
  }
  check_heads(p.heads_q, p.heads_kv);
  check_head_dims(p.head_dim, p.head_dim_v);
}

DataType lse_dtype(const Problem& p) { return p.dtype == DataType::kFloat64 ? DataType::kFloat64 : DataType::kFloat32; }

/// Dtype of out and of the gradients of q, k and v.
DataType result_dtype(const Problem& p) { return p.features.partial_out ? lse_dtype(p) : p.dtype; }
/// Dtype of a backward's out and dq, which may be rounded although dk and dv are not.
DataType row_dtype(const Problem& p) { return p.out.dtype == p.dtype ? p.dtype : result_dtype(p); }

void check_inputs(Problem& p, bool with_data) {
  read_sizes(p);
  const Requirement q{
      {p.batch, p.seqlen_q, p.heads_q, p.head_dim}, "batch, seqlen_q, heads_q, head_dim", p.dtype, true, false};
  const Requirement k{{p.batch, p.seqlen_k, p.heads_kv, p.head_dim},
                      "q's batch, seqlen_k, heads_kv, q's head_dim",
                      p.dtype,
                      true,
                      false};
  const Requirement v{{p.batch, p.seqlen_k, p.heads_kv, p.head_dim_v},
                      "q's batch, k's seqlen_k, k's heads_kv, head_dim_v",
                      p.dtype,
                      true,
                      false};
  check_tensor("q", p.q, q, p.device, with_data);
  check_tensor("k", p.k, k, p.device, with_data);
  check_tensor("v", p.v, v, p.device, with_data);
}

void check_out_and_lse(const Problem& p, bool with_data, bool output) {
  check_tensor("out", p.out,
               {{p.batch, p.seqlen_q, p.heads_q, p.head_dim_v},
                "batch, seqlen_q, heads_q, head_dim_v",
                output ? result_dtype(p) : row_dtype(p),
                true,
                output},
               p.device, with_data);
  check_tensor("lse", p.lse,
               {{p.batch, p.heads_q, p.seqlen_q}, "batch, heads_q, seqlen_q", lse_dtype(p), false, output}, p.device,
               with_data);
}

/// A mask is never copied behind the caller's back.
void check_mask_device(const MaskView& view, const Device& device) {
  if (!has_contents(view) || view.device == device) return;
  const char* const contents = view.column_ptr ? "interval lists" : "vectors";
  const char* const maker = view.column_ptr ? "from_interval_lists" : "from_startend_row_indices, with_block_mask";
  throw_invalid("the mask's ", contents, " are on ", describe(view.device), " and q on ", describe(device),
                "; copy the ", contents, " to ", describe(device), " and make the mask from the copy",
                device.kind == Device::Kind::kCuda ? message(" (", maker, ")") : "");
}

void check_mask(const Problem& p) {
  const MaskView& view = p.mask;
  check_mask_device(view, p.device);
  if (view.seqlen_q != p.seqlen_q || view.seqlen_k != p.seqlen_k) {
    throw_invalid("mask has lengths (", view.seqlen_q, ", ", view.seqlen_k, "); those of q and k are (", p.seqlen_q,
                  ", ", p.seqlen_k, ")");
  }
  for (const auto& [what, n] : {std::pair{"mask's vectors have", view.bounds_batch},
                                {"mask's block mask has", view.block_batch},
                                {"mask's q_pos has", view.q_pos_batch},
                                {"mask's k_pos has", view.k_pos_batch}}) {
    if (!is_one_of(n, {1, p.batch}))
      throw_invalid(what, " ", n, " batch entries; it must be 1 or q's batch, ", p.batch);
  }
  for (const auto& [what, n] :
       {std::pair{"mask's vectors have", view.bounds_heads}, {"mask's block mask has", view.block_heads}}) {
    if (!is_one_of(n, {1, p.heads_kv, p.heads_q}))
      throw_invalid(what, " ", n, " heads; it must be 1, heads_kv (", p.heads_kv, ") or heads_q (", p.heads_q, ")");
  }
}

void check_dense(const Problem& p, bool with_data) {
  const TensorView& t = p.dense;
  const bool shape = t.rank == 4 && is_one_of(t.shape[0], {1, p.batch}) &&
                     is_one_of(t.shape[1], {1, p.heads_kv, p.heads_q}) && t.shape[2] == p.seqlen_q &&
                     t.shape[3] == p.seqlen_k;
  if (!shape || (t.dtype != DataType::kBool && t.dtype != DataType::kUInt8)) {
    throw_invalid("dense_mask is ", describe(t), "; it must be bool or uint8 [1 or ", p.batch, ", 1 or ", p.heads_kv,
                  " or ", p.heads_q, ", ", p.seqlen_q, ", ", p.seqlen_k, "]");
  }
  check_extent("dense_mask", t);
  check_strides("dense_mask", t, false, false);
  if (t.device != p.device) throw_invalid("dense_mask is on ", describe(t.device), " and q on ", describe(p.device));
  if (with_data) check_data("dense_mask", t);
}

void check_dsink(const Problem& p, bool with_data) {
  if (!p.dsink.defined()) return;
  if (!p.features.sink.defined()) throw_invalid("dsink is ", describe(p.dsink), "; it must be absent without sink");
  check_tensor("dsink", p.dsink, {{p.heads_q}, "sink's shape and dtype", p.features.sink.dtype, false, true}, p.device,
               with_data);
}

[[noreturn]] void throw_other_mask() {
  throw_invalid("plan was not made for this mask; build one from exactly the mask that the call gets");
}

void check_plan(const Problem& p) {
  const PlanLayout& plan = p.plan.layout();
  if (p.plan.device() != p.device) {
    throw_invalid("the plan is on ", describe(p.plan.device()), " and q on ", describe(p.device),
                  "; build it where the tensors are (build_plan with a device, PlanView::on_device)");
  }
  if (plan.seqlen_q != p.seqlen_q || plan.seqlen_k != p.seqlen_k) {
    throw_invalid("plan was made for lengths (", plan.seqlen_q, ", ", plan.seqlen_k, "); the call has (", p.seqlen_q,
                  ", ", p.seqlen_k, ")");
  }
  if (p.dense.defined()) return;
  if (plan.batch != p.mask.batch() || plan.heads != p.mask.heads()) throw_other_mask();
  if (p.device.kind == Device::Kind::kCpu) return check_plan_hash(p);
  if (plan.has_bits() == (p.mask.column_ptr != nullptr)) return;
  throw_invalid("the plan has ", plan.has_bits() ? "" : "no ", "bits, and the mask ", plan.has_bits() ? "no " : "",
                "interval lists; on a CUDA device a plan of these, and of no other mask, has bits (PlanLayout with bit "
                "tiles, see most_bit_tiles and count_bit_tiles)");
}

void check_arrivals(const Problem& p, bool with_data) {
  const Arrivals& a = p.arrivals;
  if (!a.defined()) return;
  const int64_t blocks = ceil_div(p.seqlen_k, int64_t{128}), entries = a.needed.rank == 2 ? a.needed.shape[0] : 1;
  if (!is_one_of(entries, {1, p.batch}))
    throw_invalid("arrivals' needed has ", entries, " batch entries; it must be 1 or q's batch, ", p.batch);
  check_tensor("arrivals' needed", a.needed,
               {{entries, blocks}, "1 or batch, ceil(seqlen_k / 128)", DataType::kInt32, true, true}, p.device,
               with_data);
  check_tensor("arrivals' state", a.state, {{2}, "2", DataType::kInt32, true, true}, p.device, with_data);
  if (!(a.timeout > 0 && a.timeout <= kMostArrivalTimeout))
    throw_invalid("arrivals' timeout is ", a.timeout, "; it must be above 0 and at most ", kMostArrivalTimeout,
                  " seconds");
}

void check_early_keys(const Problem& p, bool with_data) {
  const EarlyKeys& early = p.early;
  if (!p.features.partial_out) throw_invalid("early keys are given without partial_out, which they need");
  if (early.dk.rank != 4)
    throw_invalid("early dk is ", describe(early.dk),
                  "; it must have 4 dimensions, [batch, early keys, heads_kv, head_dim]");
  const int64_t keys = early.dk.shape[1], first = p.seqlen_k - keys;
  if (keys < 0 || first < 0 || first % 128 != 0)
    throw_invalid("early dk is of ", keys, " keys of ", p.seqlen_k, "; those before them must be a multiple of 128");
  check_tensor(
      "early dk", early.dk,
      {{p.batch, keys, p.heads_kv, p.head_dim}, "batch, early keys, heads_kv, head_dim", result_dtype(p), true, true},
      p.device, with_data);
  check_tensor("early dv", early.dv,
               {{p.batch, keys, p.heads_kv, p.head_dim_v}, "early dk's keys, head_dim_v", result_dtype(p), true, true},
               p.device, with_data);
  if (with_data && !early.event) throw_invalid("early keys' event is null");
}

Problem begin(const AttentionInputs& args, const MaskView* mask, const Options& options, bool with_data) {
  check_options(options);
  if (args.dense_mask.defined() && mask) throw_invalid("mask and dense_mask are both given; dense_mask replaces mask");
  Problem p;
  p.deterministic = options.deterministic;
  p.kernels = options.kernels;
  p.executed_tiles = options.executed_tiles;
  p.max_mask_bytes = options.max_mask_bytes;
  p.q = args.q;
  p.k = args.k;
  p.v = args.v;
  p.dense = args.dense_mask;
  p.plan = args.plan;
  check_inputs(p, with_data);
  read_options(options, p.head_dim, p);
  check_tensor_options(p.features, p.batch, p.heads_q, p.dtype, p.device, with_data);
  check_dropout_origins(p.features.dropout, {p.batch, p.heads_q, p.seqlen_q, p.seqlen_k}, p.device, with_data);
  if (with_data) check_dropout_state(p.features.dropout);
  p.mask = mask ? *mask : view_of({.seqlen_q = p.seqlen_q, .seqlen_k = p.seqlen_k});
  check_mask(p);
  if (p.dense.defined()) check_dense(p, with_data);
  if (p.plan.defined()) check_plan(p);
  if (p.dense.defined()) p.plan = {};
  return p;
}

}  // namespace

void check_dropout(const Dropout& dropout) { check_value(option_of("dropout_p"), {.dropout = dropout}); }

void check_dropout_state(const Dropout& dropout) {
  if (dropout.p > 0 && !dropout.state)
    throw_invalid("dropout_state is null; with dropout_p ", dropout.p, " it must be a seed and an offset");
  if (reinterpret_cast<std::uintptr_t>(dropout.state) % alignof(uint64_t) != 0)
    throw_invalid("dropout_state is not aligned to ", alignof(uint64_t), " bytes");
}

void check_dropout_origins(const Dropout& dropout, const int64_t (&weights)[4], const Device& device, bool with_data) {
  if (dropout.p == 0) return;
  const auto& [batch, heads, seqlen_q, seqlen_k] = weights;
  const auto check = [&](const char* name, const TensorView& origin, int64_t seqlen, const char* meaning) {
    if (!origin.defined()) return;
    const int64_t entries = origin.rank == 2 && origin.shape[0] == batch ? batch : 1;
    check_tensor(name, origin, {{entries, ceil_div(seqlen, int64_t{16})}, meaning, DataType::kInt32, true, false},
                 device, with_data);
  };
  check("dropout_q_origin", dropout.q_origin, seqlen_q, "1 or batch, ceil(seqlen_q / 16)");
  check("dropout_k_origin", dropout.k_origin, seqlen_k, "1 or batch, ceil(seqlen_k / 16)");
  const int64_t most = INT32_MAX - heads;
  if (dropout.first_head < 0 || dropout.first_head > most)
    throw_invalid("dropout_first_head is ", dropout.first_head, "; it must be at least 0 and at most ", most);
}

void check_plan_hash(const Problem& p) {
  const bool is_known = p.device.kind == Device::Kind::kCpu && p.mask.content_hash != 0;
  if (is_known && p.plan.mask_hash() != p.mask.content_hash) throw_other_mask();
}

Problem check(const ForwardArgs& args, const MaskView* mask, const Options& options, bool with_data) {
  Problem p = begin(args, mask, options, with_data);
  p.out = args.out;
  p.lse = args.lse;
  p.arrivals = args.arrivals;
  check_out_and_lse(p, with_data, true);
  check_arrivals(p, with_data);
  return p;
}

Problem check(const BackwardArgs& args, const MaskView* mask, const Options& options, bool with_data) {
  Problem p = begin(args, mask, options, with_data);
  p.is_backward = true;
  p.out = args.out;
  p.lse = args.lse;
  p.dout = args.dout;
  p.dlse = args.dlse;
  p.dq = args.dq;
  p.dk = args.dk;
  p.dv = args.dv;
  p.dsink = args.dsink;
  check_out_and_lse(p, with_data, false);
  check_tensor("dout", p.dout, {{p.batch, p.seqlen_q, p.heads_q, p.head_dim_v}, "out's shape", p.dtype, false, false},
               p.device, with_data);
  if (p.dlse.defined())
    check_tensor("dlse", p.dlse, {{p.batch, p.heads_q, p.seqlen_q}, "lse's shape", lse_dtype(p), false, false},
                 p.device, with_data);
  check_tensor("dq", p.dq, {{p.batch, p.seqlen_q, p.heads_q, p.head_dim}, "q's shape", row_dtype(p), true, true},
               p.device, with_data);
  p.early = args.early;
  if (p.early.defined()) check_early_keys(p, with_data);
  const int64_t keys = p.first_early_key();
  check_tensor("dk", p.dk, {{p.batch, keys, p.heads_kv, p.head_dim}, "k's shape", result_dtype(p), true, true},
               p.device, with_data);
  check_tensor("dv", p.dv, {{p.batch, keys, p.heads_kv, p.head_dim_v}, "v's shape", result_dtype(p), true, true},
               p.device, with_data);
  check_dsink(p, with_data);
  return p;
}

}  // namespace flashmask
