// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "flashmask/options.def"

/// The operators' schemas; benchmarks/measure/torch_overhead.py compares with empty operators of these schemas.
/// Arguments with a default are rarely given, and so cost a call next to nothing; dsink is empty without sink, as
/// torch's traces know no tensors that may be missing.
namespace schemas {

#define FLASHMASK_PLAIN_OPTIONS                                                                                        \
  "float? softmax_scale, bool causal, SymInt? q_offset, SymInt window_left, SymInt window_right, bool deterministic, " \
  "str backend, int max_ctas=0"
#define FLASHMASK_MASK_TENSORS \
  ", Tensor? q_pos=None, Tensor? k_pos=None, Tensor? column_ptr=None, Tensor? intervals=None"
#define FLASHMASK_TENSOR(field, ...) ", Tensor? " #field "=None"
#define FLASHMASK_NUMBER(field, ...) ", float " #field "=0."
#define FLASHMASK_COUNT(field, ...) ", int " #field "=0"
#define FLASHMASK_FLAG(field, ...) ", bool " #field "=False"
#define FLASHMASK_DROPOUT_TENSORS \
  ", Tensor? dropout_state=None, Tensor? dropout_q_origin=None, Tensor? dropout_k_origin=None"
#define FLASHMASK_OPTIONS                                                                      \
  FLASHMASK_PLAIN_OPTIONS FLASHMASK_MASK_TENSORS FLASHMASK_DROPOUT_TENSORS FLASHMASK_FEATURES( \
      FLASHMASK_TENSOR, FLASHMASK_NUMBER, FLASHMASK_COUNT, FLASHMASK_FLAG) ", int dropout_first_head=0"
#define FLASHMASK_BACKWARD_INPUTS                                                                             \
  "Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? bounds, Tensor? " \
  "block_mask, Tensor? plan, "

/// counted: of the size that the contents need (fm_plan_count_bytes), for which it may wait for the device; otherwise
/// in bits, with room for as many bit tiles as there can be. max_mask_bytes: as fm_options has it.
constexpr const char* kPlan =
    "plan(Tensor? bounds, Tensor? block_mask, SymInt seqlen_q, SymInt seqlen_k, bool causal, SymInt? q_offset, SymInt "
    "window_left, SymInt window_right, Device device" FLASHMASK_MASK_TENSORS
    ", bool counted=False, int max_mask_bytes=0) -> "
    "Tensor";
constexpr const char* kForward =
    "forward(Tensor q, Tensor k, Tensor v, Tensor? bounds, Tensor? block_mask, Tensor? plan, " FLASHMASK_OPTIONS
    ") -> (Tensor out, Tensor lse)";
/// needed, state, timeout: fm_arrivals; its state is written.
constexpr const char* kArrivingForward =
    "arriving_forward(Tensor q, Tensor k, Tensor v, Tensor needed, Tensor(a!) state, float timeout, Tensor? bounds, "
    "Tensor? block_mask, Tensor? plan, " FLASHMASK_OPTIONS ") -> (Tensor out, Tensor lse)";
constexpr const char* kBackward =
    "backward(" FLASHMASK_BACKWARD_INPUTS FLASHMASK_OPTIONS ") -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsink)";
/// dkv: dk and then dv, each contiguous, in one dimension: a context parallel backward sends both at once.
constexpr const char* kPartialBackward =
    "partial_backward(" FLASHMASK_BACKWARD_INPUTS FLASHMASK_PLAIN_OPTIONS FLASHMASK_MASK_TENSORS
    ") -> (Tensor dq, Tensor dkv)";

/// dk, dv: of the last keys, fm_early_keys, which are written before the rest; event and stream: handles of CUDA.
/// dkv: of the keys before them, as partial_backward has it; dsink likewise without early keys.
constexpr const char* kEarlyBackward = "early_backward(" FLASHMASK_BACKWARD_INPUTS
                                       "Tensor(a!) dk, Tensor(b!) dv, int event, int stream, " FLASHMASK_OPTIONS
                                       ") -> (Tensor dq, Tensor dkv, Tensor dsink)";

/// names: of the vectors and then of the numbers, between commas. shape: keys, and how many numbers the bounds, the
/// order and the positions have for each of them; keys -1 where only the vectors' contents say it. unfit: one number
/// that is 1 if contents on a device do not fit; empty unless `checked`, and in host memory. positions: of rows and of
/// keys, [batch, keys].
constexpr const char* kBuildMask =
    "build_mask(str family, Tensor[] vectors, str names, SymInt[] numbers, SymInt[] shape, bool checked, Device "
    "device) "
    "-> (Tensor bounds, Tensor order, Tensor unfit, Tensor positions)";

#define FLASHMASK_PAGES "Tensor? page_table, Tensor? page_indptr, Tensor? page_indices, Tensor? seqlens, "
#define FLASHMASK_TABLES FLASHMASK_PAGES "Tensor? k_scale, Tensor? v_scale, "
#define FLASHMASK_SEQUENCE_MASK                                                                              \
  "Tensor? cu_seqlens_q, bool causal, SymInt window_left, SymInt window_right, bool keys_in_pages, Tensor? " \
  "bounds, Tensor? tail, Tensor? tail_lens, Tensor? tail_depth, Tensor? q_pos, Tensor? k_pos, Tensor? block_mask, "
#define FLASHMASK_NONE(...)
#define FLASHMASK_GIVEN_TENSOR(field, ...) ", Tensor? " #field
#define FLASHMASK_GIVEN_NUMBER(field, ...) ", float " #field
#define FLASHMASK_CACHED_OPTIONS                                    \
  FLASHMASK_CACHED_FEATURES(FLASHMASK_NONE, FLASHMASK_GIVEN_NUMBER) \
  FLASHMASK_CACHED_FEATURES(FLASHMASK_GIVEN_TENSOR, FLASHMASK_NONE)

/// plan_state: a plan's capacities and what it was built for, int64 in host memory (CachePlan).
constexpr const char* kCachedForward =
    "cached_forward(Tensor(a!) out, Tensor(b!)? lse, Tensor q, Tensor k, Tensor "
    "v, " FLASHMASK_TABLES FLASHMASK_SEQUENCE_MASK "float? softmax_scale" FLASHMASK_CACHED_OPTIONS
    ", bool batch_invariant, SymInt split_size, Tensor? plan, Tensor? plan_state, str backend, int max_ctas) -> ()";
/// rows: of each request, without cu_seqlens_q.
constexpr const char* kCachedPlanBuild =
    "cached_plan_build(Tensor(a!) plan, Tensor(b!) plan_state, Tensor k, Tensor "
    "v, " FLASHMASK_TABLES FLASHMASK_SEQUENCE_MASK "bool batch_invariant, SymInt split_size, SymInt rows) -> ()";
/// bounds: of the rows; mask_bounds: of the cache.
constexpr const char* kAppendKv =
    "append_kv(Tensor k_rows, Tensor v_rows, Tensor(a!) k, Tensor(b!) v, " FLASHMASK_PAGES
    "Tensor(c!)? k_scale, Tensor(d!)? v_scale, Tensor? cu_seqlens, Tensor? slots, Tensor? bounds, Tensor(e!)? "
    "mask_bounds, bool causal, bool keys_in_pages, bool write_scales) -> ()";

#undef FLASHMASK_CACHED_OPTIONS
#undef FLASHMASK_GIVEN_NUMBER
#undef FLASHMASK_GIVEN_TENSOR
#undef FLASHMASK_NONE
#undef FLASHMASK_SEQUENCE_MASK
#undef FLASHMASK_TABLES
#undef FLASHMASK_PAGES
#undef FLASHMASK_BACKWARD_INPUTS
#undef FLASHMASK_OPTIONS
#undef FLASHMASK_DROPOUT_TENSORS
#undef FLASHMASK_FLAG
#undef FLASHMASK_COUNT
#undef FLASHMASK_NUMBER
#undef FLASHMASK_TENSOR
#undef FLASHMASK_MASK_TENSORS
#undef FLASHMASK_PLAIN_OPTIONS

}  // namespace schemas
