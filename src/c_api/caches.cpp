// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <iterator>

#include "c_api/read.h"
#include "cache/cached_call.h"
#include "flashmask/kv_cache.h"

namespace flashmask::c_api {
namespace {

KvCacheView read_cache(const fm_kv_cache* from, Device device) {
  const auto c = read_struct(from, "cache");
  if (c.reserved) throw_unsupported("cache->reserved is ", c.reserved, "; it must be zero");
  return {.k = tensor(c.k, "cache.k", device),
          .v = tensor(c.v, "cache.v", device),
          .page_table = tensor(c.page_table, "page_table", device),
          .page_indptr = tensor(c.page_indptr, "page_indptr", device),
          .page_indices = tensor(c.page_indices, "page_indices", device),
          .seqlens = tensor(c.seqlens, "seqlens", device),
          .k_scale = tensor(c.k_scale, "k_scale", device),
          .v_scale = tensor(c.v_scale, "v_scale", device)};
}

SequenceMaskView read_sequence_mask(const fm_sequence_mask* from, Device device) {
  if (!from) return {};
  const auto m = read_struct(from, "mask");
  check_flags(m.flags, FM_CAUSAL | FM_HAS_WINDOW | FM_KEYS_IN_PAGES, "mask");
  const bool has_window = (m.flags & FM_HAS_WINDOW) != 0;
  return {.causal = (m.flags & FM_CAUSAL) != 0,
          .window_left = has_window ? m.window_left : -1,
          .window_right = has_window ? m.window_right : -1,
          .bounds = tensor(m.bounds, "bounds", device),
          .key_layout = m.flags & FM_KEYS_IN_PAGES ? KeyLayout::kPages : KeyLayout::kSequences,
          .tail = tensor(m.tail, "tail", device),
          .tail_lens = tensor(m.tail_lens, "tail_lens", device),
          .tail_depth = tensor(m.tail_depth, "tail_depth", device),
          .q_pos = tensor(m.q_pos, "q_pos", device),
          .k_pos = tensor(m.k_pos, "k_pos", device),
          .block_mask = tensor(m.block_mask, "block_mask", device)};
}

int64_t split_size_of(int64_t given) { return given == 0 ? kDefaultSplitSize : given; }

CachedPlan read_plan(const fm_cached_plan& c, Device device) {
  check_flags(c.flags, FM_BATCH_INVARIANT | FM_FLOAT8_CACHE | FM_FOREST, "plan");
  CachedPlan plan{.capacities = {.max_batch = c.max_batch,
                                 .max_rows = c.max_rows,
                                 .max_keys = c.max_keys,
                                 .heads_q = c.heads_q,
                                 .heads_kv = c.heads_kv,
                                 .head_dim = c.head_dim,
                                 .head_dim_v = c.head_dim_v,
                                 .max_total_keys = c.max_total_keys,
                                 .batch_invariant = (c.flags & FM_BATCH_INVARIANT) != 0,
                                 .split_size = split_size_of(c.split_size),
                                 .float8 = (c.flags & FM_FLOAT8_CACHE) != 0,
                                 .forest = (c.flags & FM_FOREST) != 0},
                  .buffer = memory(c.buffer, c.bytes, "plan->buffer"),
                  .device = device};
  std::copy(std::begin(c.built_for), std::end(c.built_for), plan.built_for.begin());
  return plan;
}

/// A call's arguments as the library takes them, with the plan that they point to.
struct CachedArgs {
  CachedForwardArgs args;
  CachedPlan plan;

  CachedArgs(const fm_cached_args* from, Device device, bool reads_plan = true) {
    const auto c = read_struct(from, "args");
    check_flags(c.flags, FM_BATCH_INVARIANT, "args");
    args = {.q = tensor(c.q, "q", device),
            .out = tensor(c.out, "out", device),
            .lse = tensor(c.lse, "lse", device),
            .cu_seqlens_q = tensor(c.cu_seqlens_q, "cu_seqlens_q", device),
            .cache = read_cache(c.cache, device),
            .mask = read_sequence_mask(c.mask, device),
            .batch_invariant = (c.flags & FM_BATCH_INVARIANT) != 0,
            .split_size = split_size_of(c.split_size)};
    if (!c.plan || !reads_plan) return;
    plan = read_plan(read_struct(c.plan, "plan"), device);
    args.plan = &plan;
  }
  CachedArgs(const CachedArgs&) = delete;
  CachedArgs& operator=(const CachedArgs&) = delete;
};

}  // namespace
}  // namespace flashmask::c_api

using namespace flashmask;
using namespace flashmask::c_api;

fm_status fm_cached_forward_workspace(const fm_cached_args* args, const fm_options* options, size_t* bytes) {
  return guarded([&] {
    const CallOptions call(options);
    required(bytes, "bytes") = cached_forward_workspace(CachedArgs(args, call.device).args, call.options);
  });
}

fm_status fm_cached_forward(const fm_cached_args* args, void* workspace, size_t workspace_bytes,
                            const fm_options* options) {
  return guarded([&] {
    const CallOptions call_options(options);
    const CachedArgs read(args, call_options.device);
    CachedCall call(read.args, call_options.options, true);
    call.run(workspace_for(call, memory(workspace, workspace_bytes, "workspace"), call_options));
  });
}

fm_status fm_cached_plan_bytes(const fm_cached_plan* plan, const fm_options* options, size_t* bytes) {
  return guarded([&] {
    const CallOptions call(options);
    const auto c = read_struct(plan, "plan");
    required(bytes, "bytes") = cached_plan_bytes(read_plan(c, call.device).capacities, call.device);
  });
}

fm_status fm_cached_plan_build(const fm_cached_args* args, fm_cached_plan* plan, const fm_options* options) {
  return guarded([&] {
    const CallOptions call(options);
    auto c = read_struct(plan, "plan");
    CachedPlan built = read_plan(c, call.device);
    build_cached_plan(CachedArgs(args, call.device, false).args, built, call.options);
    std::copy(built.built_for.begin(), built.built_for.end(), std::begin(c.built_for));
    write_struct(c, plan);
  });
}

fm_status fm_append_kv(const fm_append_args* args, const fm_options* options) {
  return guarded([&] {
    const CallOptions call(options);
    const auto c = read_struct(args, "args");
    check_flags(c.flags, FM_WRITE_SCALES, "args");
    append_kv({.k = tensor(c.k, "k", call.device),
               .v = tensor(c.v, "v", call.device),
               .cu_seqlens = tensor(c.cu_seqlens, "cu_seqlens", call.device),
               .slots = tensor(c.slots, "slots", call.device),
               .bounds = tensor(c.bounds, "bounds", call.device),
               .cache = read_cache(c.cache, call.device),
               .mask = read_sequence_mask(c.mask, call.device),
               .write_scales = (c.flags & FM_WRITE_SCALES) != 0},
              call.options);
  });
}

fm_status fm_cached_validate(const fm_cached_args* args) {
  return guarded([&] { validate_cached(CachedArgs(args, {}, false).args); });
}

fm_status fm_explain_cached(const fm_cached_args* args, const fm_options* options, char* text, size_t capacity,
                            size_t* length) {
  return guarded([&] {
    const CallOptions call(options);
    copy_text(to_json(explain_cached(CachedArgs(args, call.device).args, call.options)), text, capacity, length);
  });
}
