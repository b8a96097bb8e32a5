/* SPDX-License-Identifier: Apache-2.0 */
#ifndef FLASHMASK_C_API_H
#define FLASHMASK_C_API_H

/* The C interface: plain structs and functions, to be called from C or through a foreign-function
 * interface such as Python's ctypes. No C++ exception crosses it.
 *
 * Masks, options and arguments begin with struct_size, which the caller sets to sizeof of the struct it was compiled
 * with. A library that knows more fields than the caller takes the missing ones as zero, and zero always
 * means "absent" or "default"; a caller that knows more fields than the library must leave those zero. A size that no
 * version's struct has is FM_INVALID_ARGUMENT: docs/abi.md.
 * Zero-initialise, set struct_size, then fill in what is needed. */

#include <stddef.h>
#include <stdint.h>

#include "flashmask/export.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Raised when a struct or function changes in a way that struct_size does not cover. */
#define FM_ABI_VERSION 1u

typedef enum fm_status {
  FM_OK = 0,
  FM_INVALID_ARGUMENT = 1, /* an argument is wrong in itself or contradicts another */
  FM_UNSUPPORTED = 2,      /* legal, but not something the backend does */
  FM_UNREPRESENTABLE = 3,  /* a mask that does not fit two row intervals per key column */
  FM_NO_DEVICE = 4,        /* the device or backend asked for is not present */
  FM_OUT_OF_MEMORY = 5,
  FM_INTERNAL = 6
} fm_status;

typedef enum fm_dtype {
  FM_NONE = 0,
  FM_FLOAT32 = 1,
  FM_FLOAT64 = 2,
  FM_BFLOAT16 = 3,
  FM_FLOAT16 = 4,
  FM_INT32 = 5,
  FM_BOOL = 6, /* one byte, nonzero = true */
  FM_UINT8 = 7,
  FM_INT64 = 8,      /* of the parameters of fm_mask_build and the slots of fm_append_kv alone */
  FM_FLOAT8_E4M3 = 9 /* of caches alone: e4m3fn */
} fm_dtype;

/* A strided tensor; strides count elements. dtype FM_NONE is an absent tensor. `data` is aligned to the element. Shapes
 * and strides are checked before anything is read; those that span 2^63 bytes are FM_INVALID_ARGUMENT. */
typedef struct fm_tensor {
  void* data;
  int32_t dtype; /* fm_dtype */
  int32_t ndim;
  int64_t shape[5];
  int64_t stride[5];
} fm_tensor;

typedef enum fm_flags {
  FM_DETERMINISTIC = 1u << 0, /* the same bits in every run */
  FM_CAUSAL = 1u << 1,        /* fm_mask: key <= row + q_offset; also decides how the bounds are read */
  FM_HAS_Q_OFFSET = 1u << 2,  /* fm_mask: q_offset is given; otherwise it is seqlen_k - seqlen_q */
  FM_HAS_WINDOW = 1u << 3,    /* fm_mask: window_left and window_right are given */
  FM_HAS_SCALE = 1u << 4      /* calls: softmax_scale is given; otherwise it is 1 / sqrt(head_dim) */
} fm_flags;

/* A mask. Row i stands at key position p = i + q_offset and sees key j if
 *   j <= p                                              with FM_CAUSAL, and
 *   p - window_left <= j <= p + window_right            with FM_HAS_WINDOW (-1, or as much as INT64_MAX: unbounded),
 * and i is outside of column j's hidden row intervals     with bounds, and block_mask[i / 128][j / 128] != 0 with
 * block_mask. bounds: int32 startend_row_indices [batch or 1, 1 or heads_kv or heads_q, seqlen_k, n], absolute rows: n
 * = 1 (LTS) or 2 (LTS, LTE) with FM_CAUSAL; n = 2 (LTS, UTE) or 4 (LTS, LTE, UTS, UTE) without. block_mask: bool, uint8
 * or int32 [batch or 1, 1 or heads_kv or heads_q, ceil(seqlen_q / 128), ceil(seqlen_k / 128)], nonzero = keep. q_offset
 * is within [-2^40, 2^40]. Both tensors are on options->device of the call. On a CUDA device they must be contiguous,
 * the block mask bool or uint8; they are read there while the work runs, never on the host.
 * q_pos, k_pos: both absent, or int32 [batch or 1, seqlen_q] and [batch or 1, seqlen_k], the positions p of rows and
 * those of keys that FM_CAUSAL and FM_HAS_WINDOW compare, in place of i + q_offset and j: any numbers in any order. A
 * side of the window of 2^31 - 1 or more is unbounded then; FM_HAS_Q_OFFSET must not be set. bounds and block_mask go
 * on counting rows and keys. Without FM_CAUSAL and FM_HAS_WINDOW they have no effect. Where they are and how they lie
 * there: as the other tensors.
 * column_ptr, intervals: both absent, or in place of bounds any number of hidden row intervals per column: int32 [batch
 * or 1, 1 or heads_kv or heads_q, seqlen_k + 1] and [n, 2], pairs of begin and end in absolute rows. Column j is hidden
 * from the intervals column_ptr[j] up to, but not including, column_ptr[j + 1], which ascend within an entry and head
 * and count over all of them. Intervals may be empty, overlap and come in any order. In host memory a call normalises a
 * copy of them, and takes those of at most two in every column as bounds; on a CUDA device they are read as they are.
 * Calls over a cache have no place for them. */
typedef struct fm_mask {
  uint32_t struct_size;
  uint32_t flags;
  int64_t seqlen_q;
  int64_t seqlen_k;
  int64_t q_offset;
  int64_t window_left;
  int64_t window_right;
  fm_tensor bounds;
  fm_tensor block_mask;
  fm_tensor q_pos;
  fm_tensor k_pos;
  fm_tensor column_ptr;
  fm_tensor intervals;
} fm_mask;

/* How many tiles a call executed; see ExecutedTiles in attention.h. */
typedef struct fm_executed_tiles {
  int64_t forward;
  int64_t backward_rows;
  int64_t backward_keys;
} fm_executed_tiles;

/* Returns `bytes` bytes on the call's device, of any alignment, or NULL if it has none to give. Throws nothing. */
typedef void* (*fm_allocate)(void* context, size_t bytes);

/* Options of a call beyond its tensors. Every backend implements softcap, sink, dropout, alibi_slopes and partial_out,
 * though a set of GPU kernels may lack some of them. A field other than zero that the backend does not implement is
 * FM_UNSUPPORTED, with a message that names the field. */
typedef struct fm_options {
  uint32_t struct_size;
  uint32_t flags; /* FM_DETERMINISTIC, FM_HAS_SCALE */
  double softmax_scale;
  const char* backend; /* NULL or "auto": the first that takes the call, or FLASHMASK_BACKEND */
  int32_t threads; /* CPU threads, at most; 0: OpenMP's default; no more than there is work: Options in attention.h */
  int32_t device;  /* FM_DEVICE_CPU, or 1 + the index of a CUDA device */
  void* stream;    /* cudaStream_t */
  fm_executed_tiles* executed_tiles; /* NULL counts nothing */
  double softcap;       /* scores become softcap * tanh(score / softcap), before the mask; 0: as they are */
  double dropout_p;     /* share of the attention weights that are set to zero, in [0, 1); needs dropout_state */
  uint64_t reserved[2]; /* 0 */
  fm_tensor sink;       /* float32 or q's dtype, [heads_q]: the score of one more key, whose value is zero, that every
                           row sees; see Features in attention.h */
  uint32_t partial_out; /* 1: out, dq, dk and dv are float32 (float64 for float64), for the caller to add up; see
                           Features in attention.h */
  int32_t max_ctas; /* CTAs of a CUDA call's attention kernel at a time; 0: one for each multiprocessor; see Options in
                       attention.h */
  /* Gives the call its workspace, which has to stay until the work is done, in place of `workspace`, which must then be
   * NULL. Asked once at most, after all checks and before any work. The functions that only ask do not call it. */
  fm_allocate allocate;
  void* allocate_context; /* passed on to allocate */
  const char* kernels;    /* a set of kernels by name, "sm90"; NULL or "auto": the first that run on the
                             device, or FLASHMASK_KERNELS; see Options in attention.h */
  /* {seed, offset} of dropout's random numbers, 8-byte aligned, on `device`, where they are read while the work runs: a
   * CUDA graph draws new ones in each replay. A backward takes its forward's. Not read if dropout_p is 0. */
  const uint64_t* dropout_state;
  fm_tensor alibi_slopes; /* float32, [heads_q] or [batch, heads_q]: scores are lowered by slope * |row - key|; see
                             Features in attention.h */
  int64_t split_size; /* keys from one partial sum of a forward to the next, a multiple of 128, as fm_cached_args has
                         it, whose bits the rows then have; 0: none; see Features in attention.h */
  int64_t max_mask_bytes; /* most bytes of interval lists and the plan that is made of them; 0: what the environment
                             variable FLASHMASK_MAX_MASK_BYTES says, or else a quarter of the memory of `device`; see
                             Options in attention.h */
  /* Places of the rows, keys and query heads of a call in a whole of which it is a part, and whose weights dropout then
   * keeps: int32 [1 or batch, ceil(seqlen / 16)], see Dropout in attention.h. Not read if dropout_p is 0. */
  fm_tensor dropout_q_origin;
  fm_tensor dropout_k_origin;
  int64_t dropout_first_head;
} fm_options;

#define FM_DEVICE_CPU 0

/* Keys and values that arrive while a forward runs: Arrivals in attention.h. */
typedef struct fm_arrivals {
  uint32_t struct_size;
  uint32_t reserved;
  fm_tensor needed; /* int32, [1 or batch, ceil(seqlen_k / 128)] */
  fm_tensor state;  /* int32, [2] */
  double timeout;   /* seconds of a wait; 0: 60 */
} fm_arrivals;

/* Shapes and semantics as ForwardArgs and BackwardArgs in attention.h. Everything, the mask's tensors, the plan and the
 * workspace too, is on options->device. `mask` NULL: every row sees every
 * key. `plan` (NULL: the call makes one in its workspace) is a buffer that fm_plan_build filled for exactly
 * this mask. dense_mask replaces `mask`: the baseline mode that executes every tile. */
typedef struct fm_forward_args {
  uint32_t struct_size;
  uint32_t reserved;
  fm_tensor q, k, v, out, lse;
  const fm_mask* mask;
  const void* plan;
  size_t plan_bytes;
  fm_tensor dense_mask;
  const fm_arrivals* arrivals; /* NULL: all keys are there */
} fm_forward_args;

/* Keys whose gradients a backward has before the others': EarlyKeys in attention.h. */
typedef struct fm_early_keys {
  uint32_t struct_size;
  uint32_t reserved;
  fm_tensor dk, dv;
  void* event;  /* cudaEvent_t */
  void* stream; /* cudaStream_t */
} fm_early_keys;

typedef struct fm_backward_args {
  uint32_t struct_size;
  uint32_t reserved;
  fm_tensor q, k, v, out, lse, dout, dlse, dq, dk, dv;
  const fm_mask* mask;
  const void* plan;
  size_t plan_bytes;
  fm_tensor dense_mask;
  fm_tensor dsink;            /* of options->sink's shape and dtype; absent: not wanted, as it has to be without that */
  const fm_early_keys* early; /* NULL: dk and dv are of all keys */
} fm_backward_args;

/* FM_ABI_VERSION the library was built with. */
FLASHMASK_API uint32_t fm_abi_version(void);
/* "0.1.0". */
FLASHMASK_API const char* fm_version(void);
/* The message of the calling thread's last failed call; "" if none failed. Valid until its next call. */
FLASHMASK_API const char* fm_last_error(void);
/* If that call returned FM_UNREPRESENTABLE, the first key column that does not fit; otherwise -1. */
FLASHMASK_API int64_t fm_last_error_column(void);

/* Bytes of a plan's buffer: from the shapes of `mask` alone, whose contents are not read. Plans of more than 2^40 bytes
 * (kMaxPlanBytes in plan.h) are FM_INVALID_ARGUMENT here and in every call that would make one. */
FLASHMASK_API fm_status fm_plan_bytes(const fm_mask* mask, size_t* bytes);
/* A plan on a CUDA device of a mask with interval lists has bits, too, of as many partial granules as `bytes` has room
 * for. `most`: bytes with room for all that there can be, from the shapes alone: calls that make their own plan use so
 * many, and a plan that a CUDA graph builds needs them. Without interval lists and on the CPU it is fm_plan_bytes; a
 * mask has lists if the data of column_ptr are not NULL, which are not read. `scratch`: of fm_plan_count_bytes, 0 if it
 * has nothing to count. FM_UNSUPPORTED if lists and a plan of `most` bytes (without its bits, if `most` is NULL: not
 * asked for) take more than options->max_mask_bytes. */
FLASHMASK_API fm_status fm_plan_device_bytes(const fm_mask* mask, const fm_options* options, size_t* most,
                                             size_t* scratch);
/* Bytes that the plan of the mask's contents as they are needs on options->device, where `scratch` is, too (8-byte
 * aligned; NULL if it has 0 bytes): count_plan_layout in plan.h, so that a long plan of few runs takes memory linear in
 * the lengths. Waits for options->stream on a CUDA device, if `scratch` has bytes. FM_UNSUPPORTED if lists and the plan
 * take more than options->max_mask_bytes. */
FLASHMASK_API fm_status fm_plan_count_bytes(const fm_mask* mask, void* scratch, size_t scratch_bytes,
                                            const fm_options* options, size_t* bytes);
/* Fills `buffer` (8-byte aligned) with the plan of the mask's contents as they are. Both are on options->device (NULL:
 * in host memory); on a CUDA device the work is put on options->stream and the call does not wait for it, unless
 * `buffer` is shorter than fm_plan_device_bytes' `most`: then FM_INVALID_ARGUMENT if the contents need more. */
FLASHMASK_API fm_status fm_plan_build(const fm_mask* mask, void* buffer, size_t bytes, const fm_options* options);
/* FM_INVALID_ARGUMENT if `plan` is not the plan of the mask's contents as they are now. A debugging aid: calls on a
 * CUDA device cannot check that. There `scratch` needs plan_bytes bytes of the device's memory, 8-byte aligned, and
 * the function waits for options->stream; on the CPU it may be NULL. */
FLASHMASK_API fm_status fm_plan_validate(const fm_mask* mask, const void* plan, size_t plan_bytes, void* scratch,
                                         size_t scratch_bytes, const fm_options* options);

/* A parameter of a mask family by its name: a vector or, if that is absent, a number. */
typedef struct fm_mask_parameter {
  const char* name;
  fm_tensor vector; /* int32 or int64, [n], [batch, n] or [batch, heads, n]; any strides */
  int64_t number;
} fm_mask_parameter;

typedef struct fm_mask_parameters {
  uint32_t struct_size;
  uint32_t count;
  const fm_mask_parameter* items;
} fm_mask_parameters;

/* Masks by the name of their family: docs/families.md says what each family sees and takes. Vectors are on
 * options->device (NULL: in host memory). There a wrong value is FM_INVALID_ARGUMENT, which names the parameter, and a
 * mask that does not fit two intervals FM_UNREPRESENTABLE. On a CUDA device values are not read by the host: the masks
 * of wrong ones are wrong, but harmless.
 *
 * fm_mask_shape sets all of *out but its struct_size, with bounds.data NULL. Values are read only in host memory, and
 * only where the mask's lengths follow from them. fm_mask_build takes *out as fm_mask_shape has left it, with
 * bounds.data set to memory for int32 [batch, heads, seqlen_k, n], contiguous, on the same device, and fills it. A
 * family that is only a band has no bounds. One with positions (a tree with a window) has them in q_pos and k_pos,
 * which are the same, so that both get one data pointer, to memory for int32 [batch, seqlen_k]. On a CUDA device the
 * work is put on options->stream, and its scratch, if it takes any, comes from options->allocate; the call does not
 * wait.
 *
 * A family whose form has_lists makes masks that may need interval lists, in host memory alone. With out->column_ptr
 * fm_mask_build writes all of *out as the functions below do, "Where one writes a mask to out"; so it does in any case
 * if the form has no vectors, and fm_mask_shape then gives bounds the shape of the space, [batch, heads, seqlen_k, 4].
 */
FLASHMASK_API fm_status fm_mask_shape(const char* family, const fm_mask_parameters* parameters, fm_mask* out,
                                      const fm_options* options);
FLASHMASK_API fm_status fm_mask_build(const char* family, const fm_mask_parameters* parameters, fm_mask* out,
                                      const fm_options* options);
/* Every mask family: {"families": [{"name", "parameters": [{"name", "kind", "doc", "is_optional"}, with "least" and
 * "default" of numbers], "names": all that fm_mask_shape takes, "form", "option", "other_form", "has_order"}, ...]}. A
 * form is {"vectors": numbers for each key, "edges": the band, "has_positions", "misfit": the requirement that
 * unfit_out tells of, "has_lists"}; it is "other_form" if the number "option" is not its default. Text as fm_explain
 * writes it. */
FLASHMASK_API fm_status fm_mask_families_json(char* text, size_t capacity, size_t* length);

/* The functions of masks that follow read and write host memory. Where one writes a mask to `out`, the caller sets
 * out->struct_size and out->bounds, which has to be contiguous int32 [batch, heads, seqlen_k, 4] and is the space for
 * the vectors. All other fields are written; bounds.shape[3] becomes the number of vectors, which then lie contiguously
 * from bounds.data on, and bounds is absent if there are none.
 * A mask with more than two intervals in a column needs space for interval lists: out->column_ptr, contiguous int32
 * [batch, heads, seqlen_k + 1]; without it that is FM_UNREPRESENTABLE, naming the first such column. out->intervals is
 * written if it is contiguous int32 [n, 2] for the number n of the result. Otherwise its data becomes NULL and its
 * shape [n, 2], for a second call with that space. */

/* Writes the mask as a dense matrix, 1 = visible, to `visible`: bool or uint8, contiguous, [mask batch, mask heads,
 * seqlen_q, seqlen_k]. */
FLASHMASK_API fm_status fm_mask_to_dense(const fm_mask* mask, const fm_tensor* visible);
/* The mask of a dense matrix, exactly. visible: bool or uint8 [batch, heads, seqlen_q, seqlen_k], nonzero = visible,
 * any strides. The fewest intervals per column win, as from_dense in mask.h finds them; more than two need
 * space for interval lists. */
FLASHMASK_API fm_status fm_mask_from_dense(const fm_tensor* visible, fm_mask* out);
/* Writes `mask` in the smallest of the four forms of bounds that expresses it exactly, with FM_CAUSAL or without.
 * FM_UNREPRESENTABLE if none does; FM_UNSUPPORTED for a mask with a block mask. batch and heads are those of
 * mask->bounds, or 1. */
FLASHMASK_API fm_status fm_mask_to_startend(const fm_mask* mask, fm_mask* out);

/* Rows and keys of a mask, each one segment after another. */
typedef struct fm_segments {
  uint32_t struct_size;
  uint32_t reserved;
  const int64_t* rows; /* [row_count, 2]: begin and end of each; they ascend */
  int64_t row_count;
  const int64_t* keys; /* [key_count, 2], in any order */
  int64_t key_count;
} fm_segments;

/* gather in mask.h: the mask of these rows and keys, exactly. Beside the space for vectors, whose batch and heads are
 * those of mask->bounds (or 1), `out` brings space for the block mask if `mask` has one, uint8 of its batch and heads,
 * and for q_pos and k_pos if `mask` has a band, int32 of its positions' batch (or 1); all contiguous. A tensor that
 * the result does not have becomes absent. FM_UNSUPPORTED, naming the segment, if one cuts a block of a block mask. */
FLASHMASK_API fm_status fm_mask_gather(const fm_mask* mask, const fm_segments* segments, fm_mask* out);

/* intersect and concatenate in mask.h. `out` brings what it brings to fm_mask_gather; each tensor's batch and heads may
 * be any that the result's broadcast to, so the largest of the masks' own do. Space for the block mask is needed if one
 * of the masks has one, space for q_pos and k_pos likewise. A tensor that the result lacks becomes absent. */
FLASHMASK_API fm_status fm_mask_intersect(const fm_mask* a, const fm_mask* b, fm_mask* out);
/* pieces: [count] masks, one after another. */
FLASHMASK_API fm_status fm_mask_concatenate(const fm_mask* const* pieces, int64_t count, fm_mask* out);

/* Sums over all batch entries and heads of a mask, all of them exact. */
typedef struct fm_statistics {
  uint32_t struct_size;
  uint32_t reserved;
  int64_t tile_rows; /* set by the caller, as tile_keys; 0: 128 */
  int64_t tile_keys;
  int64_t elements;
  int64_t visible;
  int64_t tiles;
  int64_t full_tiles;
  int64_t partial_tiles; /* the rest is empty */
} fm_statistics;

/* Fills in what follows tile_keys. Time is linear in the lengths and the number of tiles. */
FLASHMASK_API fm_status fm_mask_statistics(const fm_mask* mask, fm_statistics* out);

/* Input of fm_mask_count_cells: one batch entry and head in cells of row_step x key_step elements. */
typedef struct fm_cells {
  uint32_t struct_size;
  uint32_t reserved;
  int64_t batch;
  int64_t head;
  int64_t row_step;
  int64_t key_step;
  int64_t most_keys; /* of a longer sequence only as many keys are counted, at equal distances and the last of all;
                        0: all */
  int64_t* visible;  /* [ceil(seqlen_q / row_step), ceil(seqlen_k / key_step)], contiguous */
  int64_t* elements; /* of the keys that are counted; the same shape, or NULL */
  int64_t count;     /* capacity of each, in numbers; at least the cells */
} fm_cells;

/* Writes how many elements of each cell are visible, and how many there are. Time is linear in the rows and keys, the
 * cells, and the size of the block mask. Vectors that lie contiguously, and a block mask of bytes, are read where they
 * are. */
FLASHMASK_API fm_status fm_mask_count_cells(const fm_mask* mask, const fm_cells* cells);

typedef enum fm_scheme {
  FM_CONTIGUOUS = 0, /* one run of rows for each rank */
  FM_ZIGZAG = 1,     /* two pieces, one from the beginning and one from the end */
  FM_BALANCED = 2    /* loads within load_slack of the mean, and few keys to receive */
} fm_scheme;

/* Which rank holds which rows: Placement in placement.h. Beyond load_slack, unit and units are written, and the arrays.
 */
typedef struct fm_placement {
  uint32_t struct_size;
  uint32_t scheme; /* fm_scheme */
  int64_t ranks;
  double load_slack;   /* share of the mean load by which the largest may exceed it; 0: 0.02 */
  int64_t unit;        /* rows of a unit */
  int64_t units;       /* ceil(seqlen / unit) */
  int32_t* owner;      /* [units]: the rank of each unit */
  int64_t owner_count; /* capacity of owner; max(ceil(seqlen / 128), 4 * ranks) is always enough */
  int64_t* live_tiles; /* [count, ranks] */
  int64_t* received;   /* [count, ranks], in keys */
} fm_placement;

/* Hands out the rows of `count` masks of one sequence, which are in host memory; place in placement.h. */
FLASHMASK_API fm_status fm_place(const fm_mask* const* masks, int64_t count, fm_placement* placement);

/* `options` may be NULL. On a CUDA device calls put their work on options->stream and return, but for executed_tiles,
 * which wait for it. Workspaces need no initialisation and no alignment. The workspace functions read shapes and
 * options only, not the data of the tensors or the mask, which may be NULL. */
FLASHMASK_API fm_status fm_forward_workspace(const fm_forward_args* args, const fm_options* options, size_t* bytes);
FLASHMASK_API fm_status fm_forward(const fm_forward_args* args, void* workspace, size_t workspace_bytes,
                                   const fm_options* options);
FLASHMASK_API fm_status fm_backward_workspace(const fm_backward_args* args, const fm_options* options, size_t* bytes);
FLASHMASK_API fm_status fm_backward(const fm_backward_args* args, void* workspace, size_t workspace_bytes,
                                    const fm_options* options);

/* Attention over a KV cache: kv_cache.h says what rows see, what values on a device may be, and all shapes. */

typedef enum fm_cache_flags {
  FM_BATCH_INVARIANT = 1u << 5, /* fm_cached_args, fm_cached_plan: a request's bits do not depend on the batch */
  FM_KEYS_IN_PAGES = 1u << 6,   /* fm_sequence_mask: bounds and k_pos lie beside the pages, not by sequences */
  FM_WRITE_SCALES = 1u << 7,    /* fm_append_args: a new token's scales, too; AppendArgs in kv_cache.h */
  FM_FLOAT8_CACHE = 1u << 8,    /* fm_cached_plan: for calls over a cache of e4m3 */
  FM_FOREST = 1u << 9           /* fm_cached_plan: many sequences as one; forest of CachedCapacities in kv_cache.h */
} fm_cache_flags;

/* KvCacheView. page_table, or page_indptr and page_indices, or none of them: contiguous. */
typedef struct fm_kv_cache {
  uint32_t struct_size;
  uint32_t reserved;
  fm_tensor k, v;
  fm_tensor page_table;
  fm_tensor page_indptr, page_indices;
  fm_tensor seqlens;
  fm_tensor k_scale, v_scale;
} fm_kv_cache;

/* SequenceMaskView. */
typedef struct fm_sequence_mask {
  uint32_t struct_size;
  uint32_t flags;      /* FM_CAUSAL, FM_HAS_WINDOW, FM_KEYS_IN_PAGES */
  int64_t window_left; /* as of fm_mask */
  int64_t window_right;
  fm_tensor bounds;
  fm_tensor tail, tail_lens, tail_depth;
  fm_tensor q_pos, k_pos;
  fm_tensor block_mask; /* bool or uint8; the others are int32 */
} fm_sequence_mask;

/* CachedPlan: what it has room for, its buffer on the device, and what it was last built for. */
typedef struct fm_cached_plan {
  uint32_t struct_size;
  uint32_t flags; /* FM_BATCH_INVARIANT, FM_FLOAT8_CACHE, FM_FOREST */
  int64_t max_batch, max_rows, max_keys;
  int64_t max_total_keys; /* 0: max_batch * max_keys */
  int64_t heads_q, heads_kv, head_dim, head_dim_v;
  int64_t split_size; /* 0: 1024 */
  void* buffer;       /* 16-byte aligned */
  size_t bytes;
  uint64_t built_for[16]; /* fm_cached_plan_build writes it */
} fm_cached_plan;

/* CachedForwardArgs. */
typedef struct fm_cached_args {
  uint32_t struct_size;
  uint32_t flags;     /* FM_BATCH_INVARIANT */
  int64_t split_size; /* 0: 1024 */
  fm_tensor q, out, lse, cu_seqlens_q;
  const fm_kv_cache* cache;
  const fm_sequence_mask* mask; /* NULL: causal */
  const fm_cached_plan* plan;   /* NULL: the call makes its own */
} fm_cached_args;

/* AppendArgs. */
typedef struct fm_append_args {
  uint32_t struct_size;
  uint32_t flags; /* FM_WRITE_SCALES */
  fm_tensor k, v, cu_seqlens, slots, bounds;
  const fm_kv_cache* cache;
  const fm_sequence_mask* mask; /* NULL: there are no bounds to write */
} fm_append_args;

/* Options as fm_forward has them: softcap, sink and alibi_slopes, softmax_scale, threads, stream, backend, allocate. */
FLASHMASK_API fm_status fm_cached_forward_workspace(const fm_cached_args* args, const fm_options* options,
                                                    size_t* bytes);
FLASHMASK_API fm_status fm_cached_forward(const fm_cached_args* args, void* workspace, size_t workspace_bytes,
                                          const fm_options* options);
/* Bytes of plan->buffer on options->device, from the capacities alone. */
FLASHMASK_API fm_status fm_cached_plan_bytes(const fm_cached_plan* plan, const fm_options* options, size_t* bytes);
/* build_cached_plan in kv_cache.h: fills plan->buffer and built_for. args->plan is not read; q, out and lse may be
 * absent, or q without data where a device's plan is for a number of rows. */
FLASHMASK_API fm_status fm_cached_plan_build(const fm_cached_args* args, fm_cached_plan* plan,
                                             const fm_options* options);
FLASHMASK_API fm_status fm_append_kv(const fm_append_args* args, const fm_options* options);
/* validate_cached in kv_cache.h, for tensors in host memory; data of q, out, lse, k and v may be NULL. */
FLASHMASK_API fm_status fm_cached_validate(const fm_cached_args* args);
/* CachedExplanation in kv_cache.h as JSON. Text as fm_explain writes it. */
FLASHMASK_API fm_status fm_explain_cached(const fm_cached_args* args, const fm_options* options, char* text,
                                          size_t capacity, size_t* length);

/* Writes which attention weights a call with this dropout keeps, 1 = kept: Dropout in attention.h. kept: bool or uint8
 * [batch, heads_q, seqlen_q, seqlen_k] in host memory, any strides. `state` is fm_options::dropout_state, in host
 * memory, too; it may be NULL if dropout_p is 0. */
FLASHMASK_API fm_status fm_dropout_mask(double dropout_p, const uint64_t* state, const fm_tensor* kept);

/* Memory that processes of one machine share, and copies under a running forward whose keys they bring:
 * docs/context-parallel.md says how ranks use them. `device` is as fm_options has it, a CUDA device; a build without
 * CUDA has none of it (FM_NO_DEVICE). */

/* Names memory to other processes of the machine. */
typedef struct fm_peer_handle {
  uint8_t bytes[64];
} fm_peer_handle;

/* Allocates zeroed memory of `device`, apart from all pools, and waits for the device. */
FLASHMASK_API fm_status fm_peer_memory_create(int32_t device, size_t bytes, void** data, fm_peer_handle* handle);
/* Maps memory that another process created, on `device` or on one that it has access to, into this process. */
FLASHMASK_API fm_status fm_peer_memory_open(int32_t device, const fm_peer_handle* handle, void** data);
/* Unmaps what was opened (is_opened 1), or frees what was created, after every process has unmapped it. */
FLASHMASK_API fm_status fm_peer_memory_release(int32_t device, void* data, int32_t is_opened);

typedef enum fm_transfer_kind {
  FM_COPY = 0,      /* `bytes` bytes from `from` to `to`, by a copy engine if they are on different devices */
  FM_WAIT_FLAG = 1, /* until the word at `to`, of `device`'s memory, is at least `value`, modulo 2^32 */
  FM_WRITE_FLAG = 2 /* `value` to the word at `to`, of `device`'s memory, when all before is done and visible to it */
} fm_transfer_kind;

typedef struct fm_transfer {
  uint32_t kind; /* fm_transfer_kind */
  uint32_t value;
  void* to;
  const void* from;
  uint64_t bytes;
} fm_transfer;

/* Puts transfers on a stream, in order. They take no multiprocessor, and go on under a kernel that has them all. */
FLASHMASK_API fm_status fm_transfers_enqueue(const fm_transfer* transfers, int64_t count, int32_t device, void* stream);

/* Writes `value` to flags in any device's memory, up to 64, when what the stream held before is done and visible to
 * whoever reads the value. By a kernel. */
FLASHMASK_API fm_status fm_peers_signal(uint32_t* const* flags, int64_t count, uint32_t value, int32_t device,
                                        void* stream);

/* The end of a forward whose keys arrived. By a kernel it waits until all pieces are there, tells the peers that this
 * rank has read the epoch's, and waits until they have read those of the epoch before, whose memory may then be filled
 * anew. If a wait takes longer than `timeout`, or the forward had given one up, all bits of out and lse are set, which
 * is NaN in every type, and *report and state[1] say what is missing: the number of a piece, or 2^30 plus the place of
 * a peer. As long as state[1] is not 0, nothing waits any more. */
typedef struct fm_settlement {
  uint32_t struct_size;
  uint32_t epoch;                /* of the exchange, from 1 on, modulo 2^32 */
  uint32_t pieces;               /* that arrive here; 0: none do */
  uint32_t peers;                /* up to 64 */
  int32_t* state;                /* of fm_arrivals */
  const uint32_t* read_by_peers; /* [peers], in `device`'s memory: the epoch whose pieces each has read */
  uint32_t* const* read_flags;   /* [peers], in host memory: where each is told the epoch that this rank has read */
  void* out;
  uint64_t out_bytes;
  void* lse;
  uint64_t lse_bytes;
  uint32_t* report; /* that the device can write: its own memory, or pinned memory of the host */
  double timeout;   /* seconds of a wait; 0: 60 */
} fm_settlement;
FLASHMASK_API fm_status fm_peers_settle(const fm_settlement* settlement, int32_t device, void* stream);

/* Which backend and configuration the call would take, and why, as text: up to `capacity` bytes with the
 * terminating zero are written to `text`, and *length (if not NULL) is the full length without it. */
FLASHMASK_API fm_status fm_explain(const fm_forward_args* args, const fm_options* options, char* text, size_t capacity,
                                   size_t* length);
FLASHMASK_API fm_status fm_explain_backward(const fm_backward_args* args, const fm_options* options, char* text,
                                            size_t capacity, size_t* length);

/* GPU properties that decide how a call runs. */
typedef struct fm_gpu_model {
  uint32_t struct_size;
  int32_t compute_major; /* compute capability */
  int32_t compute_minor;
  int32_t multiprocessors;
} fm_gpu_model;

/* Explains a call of either direction as JSON: an object with the members of Explanation in attention.h. `args` is
 * an fm_forward_args or, if is_backward is not 0, an fm_backward_args. With `gpu` (or NULL) a call on a CUDA device is
 * described as that GPU would run it; none need be there. Text as fm_explain writes it. */
FLASHMASK_API fm_status fm_explain_json(const void* args, int is_backward, const fm_options* options,
                                        const fm_gpu_model* gpu, char* text, size_t capacity, size_t* length);
/* Every GPU kernel in this build, whatever this machine can run: {"kernels": [{"id", "arch", "symbol", "op", "dtype",
 * "head_dim", "head_dim_v", "tile": {"rows", "keys"}, "threads", "shared_bytes"}, ...]}, see KernelInfo in attention.h.
 * Text as fm_explain writes it. */
FLASHMASK_API fm_status fm_kernels_json(char* text, size_t capacity, size_t* length);

#ifdef __cplusplus
}
#endif

#endif /* FLASHMASK_C_API_H */
