// SPDX-License-Identifier: Apache-2.0
//
// The PyTorch operators flashmask::cached_forward, append_kv and cached_plan_build over the C interface, written as
// ops.cpp is. They return nothing: schemas say what they write.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "call.h"
#include "flashmask/options.def"
#include "schemas.h"

namespace {

uint32_t flag_if(bool is_set, uint32_t flag) { return is_set ? flag : 0; }

/// A cache as the operators take it.
struct CacheArguments {
  const Tensor& k;
  const Tensor& v;
  const OptionalTensor& page_table;
  const OptionalTensor& page_indptr;
  const OptionalTensor& page_indices;
  const OptionalTensor& seqlens;
  const OptionalTensor& k_scale;
  const OptionalTensor& v_scale;

  fm_kv_cache read(const Call& call) const {
    fm_kv_cache cache{};
    cache.struct_size = sizeof(cache);
    cache.k = call(k, "cache.k");
    cache.v = call(v, "cache.v");
    cache.page_table = call(page_table, "page_table");
    cache.page_indptr = call(page_indptr, "page_indptr");
    cache.page_indices = call(page_indices, "page_indices");
    cache.seqlens = call(seqlens, "seqlens");
    cache.k_scale = call(k_scale, "k_scale");
    cache.v_scale = call(v_scale, "v_scale");
    return cache;
  }
};

/// A mask of sequences as the operators take it.
struct SequenceMaskArguments {
  bool causal;
  int64_t window_left, window_right;
  bool keys_in_pages;
  const OptionalTensor& bounds;
  const OptionalTensor& tail;
  const OptionalTensor& tail_lens;
  const OptionalTensor& tail_depth;
  const OptionalTensor& q_pos;
  const OptionalTensor& k_pos;
  const OptionalTensor& block_mask;

  fm_sequence_mask read(const Call& call) const {
    fm_sequence_mask mask{};
    mask.struct_size = sizeof(mask);
    mask.flags = FM_HAS_WINDOW | flag_if(causal, FM_CAUSAL) | flag_if(keys_in_pages, FM_KEYS_IN_PAGES);
    mask.window_left = window_left;
    mask.window_right = window_right;
    mask.bounds = call(bounds, "bounds");
    mask.tail = call(tail, "tail");
    mask.tail_lens = call(tail_lens, "tail_lens");
    mask.tail_depth = call(tail_depth, "tail_depth");
    mask.q_pos = call(q_pos, "q_pos");
    mask.k_pos = call(k_pos, "k_pos");
    mask.block_mask = call(block_mask, "block_mask");
    return mask;
  }
};

/// The host's part of a plan: int64 in host memory, flags and what follows them in fm_cached_plan.
class PlanState {
 public:
  explicit PlanState(const Tensor& state) : numbers_(static_cast<int64_t*>(state.data_ptr())) {
    if (!place_of(state).is_cpu() || torch_dtype(state) != aoti_torch_dtype_int64() || state.dim() != 1 ||
        state.size(0) != kNumbers || state.stride(0) != 1)
      throw std::invalid_argument("plan_state must be int64 [26] in host memory, contiguous: a CachePlan has it");
  }
  fm_cached_plan read(const Tensor& buffer, const Call& call) const {
    fm_cached_plan plan{};
    plan.struct_size = sizeof(plan);
    plan.flags = static_cast<uint32_t>(numbers_[0]);
    std::memcpy(&plan.max_batch, numbers_ + 1, kCapacities * sizeof(int64_t));
    const fm_tensor memory = call(buffer, "plan");
    plan.buffer = memory.data;
    plan.bytes = static_cast<size_t>(memory.shape[0]);
    std::memcpy(plan.built_for, numbers_ + 1 + kCapacities, sizeof(plan.built_for));
    return plan;
  }
  void write(const fm_cached_plan& plan) const {
    std::memcpy(numbers_ + 1 + kCapacities, plan.built_for, sizeof(plan.built_for));
  }

 private:
  static constexpr int64_t kCapacities = 9, kNumbers = 1 + kCapacities + 16;
  static_assert(offsetof(fm_cached_plan, buffer) - offsetof(fm_cached_plan, max_batch) ==
                kCapacities * sizeof(int64_t));
  int64_t* numbers_;
};

#define FLASHMASK_CACHE_PARAMETERS                                                                       \
  const Tensor &k, const Tensor &v, const OptionalTensor &page_table, const OptionalTensor &page_indptr, \
      const OptionalTensor &page_indices, const OptionalTensor &seqlens, const OptionalTensor &k_scale,  \
      const OptionalTensor &v_scale
#define FLASHMASK_CACHE_ARGUMENTS k, v, page_table, page_indptr, page_indices, seqlens, k_scale, v_scale
#define FLASHMASK_MASK_PARAMETERS                                                                           \
  bool causal, int64_t window_left, int64_t window_right, bool keys_in_pages, const OptionalTensor &bounds, \
      const OptionalTensor &tail, const OptionalTensor &tail_lens, const OptionalTensor &tail_depth,        \
      const OptionalTensor &q_pos, const OptionalTensor &k_pos, const OptionalTensor &block_mask
#define FLASHMASK_MASK_ARGUMENTS \
  causal, window_left, window_right, keys_in_pages, bounds, tail, tail_lens, tail_depth, q_pos, k_pos, block_mask

// Parameters for the features of calls over a cache: numbers first, as the schema has them.
#define FLASHMASK_NONE(...)
#define FLASHMASK_TENSOR(field, ...) , const OptionalTensor& field
#define FLASHMASK_NUMBER(field, ...) , double field
#define FLASHMASK_FEATURE_PARAMETERS                          \
  FLASHMASK_CACHED_FEATURES(FLASHMASK_NONE, FLASHMASK_NUMBER) \
  FLASHMASK_CACHED_FEATURES(FLASHMASK_TENSOR, FLASHMASK_NONE)
#define FLASHMASK_READ_TENSOR(field, ...) options.field = call(field, #field);
#define FLASHMASK_READ_NUMBER(field, ...) options.field = field;

void cached_forward(const Tensor& out, const OptionalTensor& lse, const Tensor& q, FLASHMASK_CACHE_PARAMETERS,
                    const OptionalTensor& cu_seqlens_q, FLASHMASK_MASK_PARAMETERS,
                    std::optional<double> softmax_scale FLASHMASK_FEATURE_PARAMETERS, bool batch_invariant,
                    int64_t split_size, const OptionalTensor& plan, const OptionalTensor& plan_state,
                    const std::string& backend, int64_t max_ctas) {
  const Place place = place_of(q);
  const Call call(place, "q");
  const fm_kv_cache cache = CacheArguments{FLASHMASK_CACHE_ARGUMENTS}.read(call);
  const fm_sequence_mask mask = SequenceMaskArguments{FLASHMASK_MASK_ARGUMENTS}.read(call);
  fm_cached_plan planned{};
  fm_cached_args args{};
  args.struct_size = sizeof(args);
  args.flags = flag_if(batch_invariant, FM_BATCH_INVARIANT);
  args.split_size = split_size;
  args.q = call(q, "q");
  args.out = call(out, "out");
  args.lse = call(lse, "lse");
  args.cu_seqlens_q = call(cu_seqlens_q, "cu_seqlens_q");
  args.cache = &cache;
  args.mask = &mask;
  if (plan && plan_state) {
    planned = PlanState(*plan_state).read(*plan, call);
    args.plan = &planned;
  }
  fm_options options = options_for(place);
  if (softmax_scale) {
    options.flags |= FM_HAS_SCALE;
    options.softmax_scale = *softmax_scale;
  }
  FLASHMASK_CACHED_FEATURES(FLASHMASK_READ_TENSOR, FLASHMASK_READ_NUMBER)
  options.backend = backend.c_str();
  options.max_ctas = static_cast<int32_t>(std::clamp<int64_t>(max_ctas, INT32_MIN, INT32_MAX));
  run(fm_cached_forward, "the workspace of attention over a cache", args, options, place);
}

/// q of calls for which a plan is built, without data: [batch, rows, heads_q, head_dim].
fm_tensor query_shape(const fm_kv_cache& cache, const fm_cached_plan& plan, int64_t rows) {
  fm_tensor q = cache.k;
  q.data = nullptr;
  if (q.dtype == FM_UINT8 || q.dtype == FM_FLOAT8_E4M3) q.dtype = FM_FLOAT32;
  const int64_t batch = cache.page_table.dtype != FM_NONE    ? cache.page_table.shape[0]
                        : cache.page_indptr.dtype != FM_NONE ? cache.page_indptr.shape[0] - 1
                                                             : cache.k.shape[0];
  const int64_t shape[] = {batch, rows, plan.heads_q, plan.head_dim};
  q.ndim = 4;
  for (int d = 3; d >= 0; --d) {
    q.shape[d] = shape[d];
    q.stride[d] = d == 3 ? 1 : q.stride[d + 1] * shape[d + 1];
  }
  return q;
}

void cached_plan_build(const Tensor& plan, const Tensor& plan_state, FLASHMASK_CACHE_PARAMETERS,
                       const OptionalTensor& cu_seqlens_q, FLASHMASK_MASK_PARAMETERS, bool batch_invariant,
                       int64_t split_size, int64_t rows) {
  const Place place = place_of(plan);
  const Call call(place, "the plan");
  const fm_kv_cache cache = CacheArguments{FLASHMASK_CACHE_ARGUMENTS}.read(call);
  const fm_sequence_mask mask = SequenceMaskArguments{FLASHMASK_MASK_ARGUMENTS}.read(call);
  const PlanState state(plan_state);
  fm_cached_plan built = state.read(plan, call);
  fm_cached_args args{};
  args.struct_size = sizeof(args);
  args.flags = flag_if(batch_invariant, FM_BATCH_INVARIANT);
  args.split_size = split_size;
  args.cu_seqlens_q = call(cu_seqlens_q, "cu_seqlens_q");
  if (!cu_seqlens_q) args.q = query_shape(cache, built, rows);
  args.cache = &cache;
  args.mask = &mask;
  const fm_options options = options_for(place);
  check(fm_cached_plan_build(&args, &built, &options), place);
  state.write(built);
}

void append_kv(const Tensor& k_rows, const Tensor& v_rows, FLASHMASK_CACHE_PARAMETERS, const OptionalTensor& cu_seqlens,
               const OptionalTensor& slots, const OptionalTensor& bounds, const OptionalTensor& mask_bounds,
               bool causal, bool keys_in_pages, bool write_scales) {
  const Place place = place_of(k_rows);
  const Call call(place, "k");
  const fm_kv_cache cache = CacheArguments{FLASHMASK_CACHE_ARGUMENTS}.read(call);
  const OptionalTensor none;
  const fm_sequence_mask mask =
      SequenceMaskArguments{causal, -1, -1, keys_in_pages, mask_bounds, none, none, none, none, none, none}.read(call);
  fm_append_args args{};
  args.struct_size = sizeof(args);
  args.flags = flag_if(write_scales, FM_WRITE_SCALES);
  args.k = call(k_rows, "k");
  args.v = call(v_rows, "v");
  args.cu_seqlens = call(cu_seqlens, "cu_seqlens");
  if (slots) {
    const bool is_long = torch_dtype(*slots) == aoti_torch_dtype_int64();
    args.slots = call.describe(*slots, "slots", is_long ? FM_INT64 : dtype_of(*slots, "slots"));
  }
  args.bounds = call(bounds, "bounds");
  args.cache = &cache;
  args.mask = &mask;
  const fm_options options = options_for(place);
  check(fm_append_kv(&args, &options), place);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(flashmask, m) {
  m.def(schemas::kCachedForward);
  m.def(schemas::kCachedPlanBuild);
  m.def(schemas::kAppendKv);
}

STABLE_TORCH_LIBRARY_IMPL(flashmask, CPU, m) {
  m.impl("cached_forward", TORCH_BOX(&cached_forward));
  m.impl("cached_plan_build", TORCH_BOX(&cached_plan_build));
  m.impl("append_kv", TORCH_BOX(&append_kv));
}

STABLE_TORCH_LIBRARY_IMPL(flashmask, CUDA, m) {
  m.impl("cached_forward", TORCH_BOX(&cached_forward));
  m.impl("cached_plan_build", TORCH_BOX(&cached_plan_build));
  m.impl("append_kv", TORCH_BOX(&append_kv));
}
