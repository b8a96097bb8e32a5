/* SPDX-License-Identifier: Apache-2.0 */
/* The layout of the C structs as FM_ABI_VERSION 1 has it on 64-bit machines: what compiles here was built against the
 * same bytes as every program before it. A struct may get fields at its end, and their lines here; no number below ever
 * changes. */
#include <flashmask/c_api.h>

#define AT(type, field, offset) _Static_assert(offsetof(type, field) == (offset), #type "." #field " moved")
/* No byte at the end that a caller need not set and a later field could be read from. */
#define ENDS_WITH(type, field) \
  _Static_assert(sizeof(type) == offsetof(type, field) + sizeof(((type*)0)->field), #type " ends in padding")
#define SIZE(type, bytes) _Static_assert(sizeof(type) == (bytes), #type " changed its size")
#define VALUE(name, value) _Static_assert((name) == (value), #name " changed its value")

VALUE(FM_ABI_VERSION, 1);

VALUE(FM_OK, 0);
VALUE(FM_INVALID_ARGUMENT, 1);
VALUE(FM_UNSUPPORTED, 2);
VALUE(FM_UNREPRESENTABLE, 3);
VALUE(FM_NO_DEVICE, 4);
VALUE(FM_OUT_OF_MEMORY, 5);
VALUE(FM_INTERNAL, 6);

VALUE(FM_NONE, 0);
VALUE(FM_FLOAT32, 1);
VALUE(FM_FLOAT64, 2);
VALUE(FM_BFLOAT16, 3);
VALUE(FM_FLOAT16, 4);
VALUE(FM_INT32, 5);
VALUE(FM_BOOL, 6);
VALUE(FM_UINT8, 7);
VALUE(FM_INT64, 8);
VALUE(FM_FLOAT8_E4M3, 9);

VALUE(FM_DETERMINISTIC, 1);
VALUE(FM_CAUSAL, 2);
VALUE(FM_HAS_Q_OFFSET, 4);
VALUE(FM_HAS_WINDOW, 8);
VALUE(FM_HAS_SCALE, 16);
VALUE(FM_BATCH_INVARIANT, 32);
VALUE(FM_KEYS_IN_PAGES, 64);
VALUE(FM_WRITE_SCALES, 128);
VALUE(FM_FLOAT8_CACHE, 256);
VALUE(FM_FOREST, 512);
VALUE(FM_DEVICE_CPU, 0);
VALUE(FM_COPY, 0);
VALUE(FM_WAIT_FLAG, 1);
VALUE(FM_WRITE_FLAG, 2);

/* These have no struct_size, so they cannot grow. */
SIZE(fm_tensor, 96);
AT(fm_tensor, data, 0);
AT(fm_tensor, dtype, 8);
AT(fm_tensor, ndim, 12);
AT(fm_tensor, shape, 16);
AT(fm_tensor, stride, 56);

SIZE(fm_executed_tiles, 24);
AT(fm_executed_tiles, forward, 0);
AT(fm_executed_tiles, backward_rows, 8);
AT(fm_executed_tiles, backward_keys, 16);

SIZE(fm_peer_handle, 64);
SIZE(fm_transfer, 32);
AT(fm_transfer, kind, 0);
AT(fm_transfer, value, 4);
AT(fm_transfer, to, 8);
AT(fm_transfer, from, 16);
AT(fm_transfer, bytes, 24);

AT(fm_gpu_model, struct_size, 0);
AT(fm_gpu_model, compute_major, 4);
AT(fm_gpu_model, compute_minor, 8);
AT(fm_gpu_model, multiprocessors, 12);
ENDS_WITH(fm_gpu_model, multiprocessors);

AT(fm_mask, struct_size, 0);
AT(fm_mask, flags, 4);
AT(fm_mask, seqlen_q, 8);
AT(fm_mask, seqlen_k, 16);
AT(fm_mask, q_offset, 24);
AT(fm_mask, window_left, 32);
AT(fm_mask, window_right, 40);
AT(fm_mask, bounds, 48);
AT(fm_mask, block_mask, 144);
AT(fm_mask, q_pos, 240);
AT(fm_mask, k_pos, 336);
AT(fm_mask, column_ptr, 432);
AT(fm_mask, intervals, 528);
ENDS_WITH(fm_mask, intervals);

AT(fm_options, struct_size, 0);
AT(fm_options, flags, 4);
AT(fm_options, softmax_scale, 8);
AT(fm_options, backend, 16);
AT(fm_options, threads, 24);
AT(fm_options, device, 28);
AT(fm_options, stream, 32);
AT(fm_options, executed_tiles, 40);
AT(fm_options, softcap, 48);
AT(fm_options, dropout_p, 56);
AT(fm_options, reserved, 64);
AT(fm_options, sink, 80);
AT(fm_options, partial_out, 176);
AT(fm_options, max_ctas, 180);
AT(fm_options, allocate, 184);
AT(fm_options, allocate_context, 192);
AT(fm_options, kernels, 200);
AT(fm_options, dropout_state, 208);
AT(fm_options, alibi_slopes, 216);
AT(fm_options, split_size, 312);
AT(fm_options, max_mask_bytes, 320);
AT(fm_options, dropout_q_origin, 328);
AT(fm_options, dropout_k_origin, 424);
AT(fm_options, dropout_first_head, 520);
ENDS_WITH(fm_options, dropout_first_head);

AT(fm_forward_args, struct_size, 0);
AT(fm_forward_args, reserved, 4);
AT(fm_forward_args, q, 8);
AT(fm_forward_args, k, 104);
AT(fm_forward_args, v, 200);
AT(fm_forward_args, out, 296);
AT(fm_forward_args, lse, 392);
AT(fm_forward_args, mask, 488);
AT(fm_forward_args, plan, 496);
AT(fm_forward_args, plan_bytes, 504);
AT(fm_forward_args, dense_mask, 512);
AT(fm_forward_args, arrivals, 608);
ENDS_WITH(fm_forward_args, arrivals);

AT(fm_arrivals, struct_size, 0);
AT(fm_arrivals, reserved, 4);
AT(fm_arrivals, needed, 8);
AT(fm_arrivals, state, 104);
AT(fm_arrivals, timeout, 200);
ENDS_WITH(fm_arrivals, timeout);

AT(fm_backward_args, struct_size, 0);
AT(fm_backward_args, reserved, 4);
AT(fm_backward_args, q, 8);
AT(fm_backward_args, k, 104);
AT(fm_backward_args, v, 200);
AT(fm_backward_args, out, 296);
AT(fm_backward_args, lse, 392);
AT(fm_backward_args, dout, 488);
AT(fm_backward_args, dlse, 584);
AT(fm_backward_args, dq, 680);
AT(fm_backward_args, dk, 776);
AT(fm_backward_args, dv, 872);
AT(fm_backward_args, mask, 968);
AT(fm_backward_args, plan, 976);
AT(fm_backward_args, plan_bytes, 984);
AT(fm_backward_args, dense_mask, 992);
AT(fm_backward_args, dsink, 1088);
AT(fm_backward_args, early, 1184);
ENDS_WITH(fm_backward_args, early);

AT(fm_early_keys, struct_size, 0);
AT(fm_early_keys, reserved, 4);
AT(fm_early_keys, dk, 8);
AT(fm_early_keys, dv, 104);
AT(fm_early_keys, event, 200);
AT(fm_early_keys, stream, 208);
ENDS_WITH(fm_early_keys, stream);

AT(fm_statistics, struct_size, 0);
AT(fm_statistics, reserved, 4);
AT(fm_statistics, tile_rows, 8);
AT(fm_statistics, tile_keys, 16);
AT(fm_statistics, elements, 24);
AT(fm_statistics, visible, 32);
AT(fm_statistics, tiles, 40);
AT(fm_statistics, full_tiles, 48);
AT(fm_statistics, partial_tiles, 56);
ENDS_WITH(fm_statistics, partial_tiles);

AT(fm_segments, struct_size, 0);
AT(fm_segments, reserved, 4);
AT(fm_segments, rows, 8);
AT(fm_segments, row_count, 16);
AT(fm_segments, keys, 24);
AT(fm_segments, key_count, 32);
ENDS_WITH(fm_segments, key_count);

AT(fm_cells, struct_size, 0);
AT(fm_cells, reserved, 4);
AT(fm_cells, batch, 8);
AT(fm_cells, head, 16);
AT(fm_cells, row_step, 24);
AT(fm_cells, key_step, 32);
AT(fm_cells, most_keys, 40);
AT(fm_cells, visible, 48);
AT(fm_cells, elements, 56);
AT(fm_cells, count, 64);
ENDS_WITH(fm_cells, count);

AT(fm_placement, struct_size, 0);
AT(fm_placement, scheme, 4);
AT(fm_placement, ranks, 8);
AT(fm_placement, load_slack, 16);
AT(fm_placement, unit, 24);
AT(fm_placement, units, 32);
AT(fm_placement, owner, 40);
AT(fm_placement, owner_count, 48);
AT(fm_placement, live_tiles, 56);
AT(fm_placement, received, 64);
ENDS_WITH(fm_placement, received);

AT(fm_kv_cache, struct_size, 0);
AT(fm_kv_cache, reserved, 4);
AT(fm_kv_cache, k, 8);
AT(fm_kv_cache, v, 104);
AT(fm_kv_cache, page_table, 200);
AT(fm_kv_cache, page_indptr, 296);
AT(fm_kv_cache, page_indices, 392);
AT(fm_kv_cache, seqlens, 488);
AT(fm_kv_cache, k_scale, 584);
AT(fm_kv_cache, v_scale, 680);
ENDS_WITH(fm_kv_cache, v_scale);

AT(fm_sequence_mask, struct_size, 0);
AT(fm_sequence_mask, flags, 4);
AT(fm_sequence_mask, window_left, 8);
AT(fm_sequence_mask, window_right, 16);
AT(fm_sequence_mask, bounds, 24);
AT(fm_sequence_mask, tail, 120);
AT(fm_sequence_mask, tail_lens, 216);
AT(fm_sequence_mask, tail_depth, 312);
AT(fm_sequence_mask, q_pos, 408);
AT(fm_sequence_mask, k_pos, 504);
AT(fm_sequence_mask, block_mask, 600);
ENDS_WITH(fm_sequence_mask, block_mask);

AT(fm_cached_plan, struct_size, 0);
AT(fm_cached_plan, flags, 4);
AT(fm_cached_plan, max_batch, 8);
AT(fm_cached_plan, max_rows, 16);
AT(fm_cached_plan, max_keys, 24);
AT(fm_cached_plan, max_total_keys, 32);
AT(fm_cached_plan, heads_q, 40);
AT(fm_cached_plan, heads_kv, 48);
AT(fm_cached_plan, head_dim, 56);
AT(fm_cached_plan, head_dim_v, 64);
AT(fm_cached_plan, split_size, 72);
AT(fm_cached_plan, buffer, 80);
AT(fm_cached_plan, bytes, 88);
AT(fm_cached_plan, built_for, 96);
ENDS_WITH(fm_cached_plan, built_for);

AT(fm_cached_args, struct_size, 0);
AT(fm_cached_args, flags, 4);
AT(fm_cached_args, split_size, 8);
AT(fm_cached_args, q, 16);
AT(fm_cached_args, out, 112);
AT(fm_cached_args, lse, 208);
AT(fm_cached_args, cu_seqlens_q, 304);
AT(fm_cached_args, cache, 400);
AT(fm_cached_args, mask, 408);
AT(fm_cached_args, plan, 416);
ENDS_WITH(fm_cached_args, plan);

AT(fm_append_args, struct_size, 0);
AT(fm_append_args, flags, 4);
AT(fm_append_args, k, 8);
AT(fm_append_args, v, 104);
AT(fm_append_args, cu_seqlens, 200);
AT(fm_append_args, slots, 296);
AT(fm_append_args, bounds, 392);
AT(fm_append_args, cache, 488);
AT(fm_append_args, mask, 496);
ENDS_WITH(fm_append_args, mask);

AT(fm_settlement, struct_size, 0);
AT(fm_settlement, epoch, 4);
AT(fm_settlement, pieces, 8);
AT(fm_settlement, peers, 12);
AT(fm_settlement, state, 16);
AT(fm_settlement, read_by_peers, 24);
AT(fm_settlement, read_flags, 32);
AT(fm_settlement, out, 40);
AT(fm_settlement, out_bytes, 48);
AT(fm_settlement, lse, 56);
AT(fm_settlement, lse_bytes, 64);
AT(fm_settlement, report, 72);
AT(fm_settlement, timeout, 80);
ENDS_WITH(fm_settlement, timeout);
