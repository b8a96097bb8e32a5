// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/cache/append.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "backends/cuda/device/launch_overlap.cuh"
#include "backends/cuda/host/kernel_info.h"
#include "backends/cuda/host/launch_chain.h"
#include "cache/token_scale.h"
#include "call/sequence_view.h"
#include "common/arithmetic.h"
#include "common/message.h"

namespace flashmask::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

/// Rows to append, [batch, rows, heads, columns], or packed with a batch stride of 0.
struct NewRows {
  const void* data;
  int64_t batch_stride, row_stride, head_stride, column_stride;
};
/// Their destination: [pages, page_size, heads, columns].
struct Stored {
  void* data;
  int64_t page_stride, slot_stride, head_stride;
  float* scale;
  int64_t scale_strides[3];
  int32_t columns;

  __device__ float* scale_at(const KeyPlace& at, int64_t head) const {
    return scale + at.page * scale_strides[0] + at.slot * scale_strides[1] + head * scale_strides[2];
  }
  /// True if all heads of a token have one scale.
  __device__ bool heads_share() const { return scale_strides[2] == 0; }
};

}  // namespace

struct AppendParams {
  CachedView call;
  NewRows k, v, bounds;
  Stored to_k, to_v;
  int64_t all_rows, rows_of_batch;  ///< rows_of_batch: 0 if rows are packed
  const void* slots;                ///< null: rows are the last of their sequences
  int64_t slots_batch_stride, slots_row_stride;
  bool slots_are_long;
  int32_t heads, bound_heads;
  bool write_scales;
};

namespace {

/// A new row and where it goes.
struct Placed {
  int64_t batch, row;  ///< in the new rows' tensors
  int64_t request, key;
  KeyPlace at{-1, 0};
};

/// The request that a packed row is of; the batch if it is none's.
__device__ int64_t request_of(const CachedView& call, int64_t row) {
  int64_t low = 0, high = call.batch;  // the last one that begins at or before the row
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (call.cu_seqlens_q.at(middle) <= row ? low : high) = middle;
  }
  return low;
}

__device__ Placed place_in_sequence(const AppendParams& p, Placed row) {
  row.request = p.rows_of_batch > 0 ? row.batch : request_of(p.call, row.row);
  if (row.request >= p.call.batch) return row;
  const SequenceView sequence(p.call, row.request);
  const int64_t i = row.row - sequence.rows().begin;
  row.key = sequence.first_row() + i;
  if (i >= 0 && i < sequence.rows().count && row.key >= 0) row.at = sequence.place(row.key);
  return row;
}

__device__ Placed place_in_slot(const AppendParams& p, Placed row) {
  const int64_t at = row.batch * p.slots_batch_stride + row.row * p.slots_row_stride;
  const int64_t slot =
      p.slots_are_long ? static_cast<const int64_t*>(p.slots)[at] : static_cast<const int32_t*>(p.slots)[at];
  if (slot >= 0 && p.call.page_size > 0 && slot / p.call.page_size < p.call.pages)
    row.at = {slot / p.call.page_size, slot % p.call.page_size};
  return row;
}

/// An element as it is stored: as it is, or divided by its scale and rounded to nearest even, to float32 before e4m3,
/// as the host does it, and as far as e4m3 reaches.
template <typename From>
__device__ __forceinline__ void convert(From x, double, From& to) {
  to = x;
}
template <typename From>
__device__ __forceinline__ void convert(From x, double scale, __nv_fp8_storage_t& to) {
  const auto quotient = static_cast<float>(static_cast<double>(static_cast<float>(x)) / scale);
  to = __nv_cvt_double_to_fp8(static_cast<double>(quotient), __NV_SATFINITE, __NV_E4M3);
}

template <typename From>
__device__ const From* new_row(const NewRows& rows, const Placed& row, int64_t head) {
  return static_cast<const From*>(rows.data) + row.batch * rows.batch_stride + row.row * rows.row_stride +
         head * rows.head_stride;
}

/// Writes the scale of a head of a token, by a warp, and returns it. Each head finds the largest number of all that
/// share the scale, and the first one writes.
template <typename From>
__device__ float write_scale(const NewRows& rows, const Stored& stored, const Placed& row, int64_t head,
                             int32_t heads) {
  const bool share = stored.heads_share();
  float largest = 0;
  for (int64_t h = share ? 0 : head; h < (share ? heads : head + 1); ++h) {
    const From* const from = new_row<From>(rows, row, h);
    for (int32_t c = static_cast<int32_t>(threadIdx.x % 32); c < stored.columns; c += 32)
      largest = fmaxf(largest, fabsf(static_cast<float>(from[c * rows.column_stride])));
  }
  // Numbers that are not negative are in the order of their bits.
  largest = __uint_as_float(__reduce_max_sync(0xffffffff, __float_as_uint(largest)));
  const float scale = token_scale(largest);
  if (threadIdx.x % 32 == 0 && (!share || head == 0)) *stored.scale_at(row.at, head) = scale;
  return scale;
}
template <typename From, typename To>
__device__ double scale_of(const AppendParams& p, const NewRows& rows, const Stored& stored, const Placed& row,
                           int64_t head) {
  if constexpr (sizeof(To) == 1) {
    if (p.write_scales) return write_scale<From>(rows, stored, row, head, p.heads);
  }
  return stored.scale ? *stored.scale_at(row.at, head) : 1.0;
}

template <typename From, typename To>
__device__ void write_row(const AppendParams& p, const NewRows& rows, const Stored& stored, const Placed& row,
                          int64_t head) {
  const From* const from = new_row<From>(rows, row, head);
  To* const to = static_cast<To*>(stored.data) + row.at.page * stored.page_stride + row.at.slot * stored.slot_stride +
                 head * stored.head_stride;
  const double scale = scale_of<From, To>(p, rows, stored, row, head);
  for (int32_t c = static_cast<int32_t>(threadIdx.x % 32); c < stored.columns; c += 32)
    convert(from[c * rows.column_stride], scale, to[c]);
}

/// Writes the row's vectors to where the mask has those of its key.
__device__ void write_bounds(const AppendParams& p, const Placed& row, int64_t head) {
  const CachedView& call = p.call;
  const auto vector = static_cast<int32_t>(threadIdx.x % 32);
  if (!p.bounds.data || head >= p.bound_heads || vector >= call.vectors) return;
  if (!call.keys_in_pages && row.key >= call.bound_columns) return;
  const auto& stride = call.bounds.stride;
  const int64_t place = call.keys_in_pages ? row.at.page * stride[0] + row.at.slot * stride[1] + head * stride[2]
                                           : row.request * stride[0] + head * stride[1] + row.key * stride[2];
  const_cast<int32_t*>(call.bounds.data)[place + vector * stride[3]] =
      static_cast<const int32_t*>(p.bounds.data)[row.batch * p.bounds.batch_stride + row.row * p.bounds.row_stride +
                                                 head * p.bounds.head_stride + vector * p.bounds.column_stride];
}

/// A warp for each new row and key head.
template <typename From, typename To>
__device__ __forceinline__ void append(const AppendParams& p) {
  wait_for_previous();
  allow_next();
  const int64_t n = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32, at = n / p.heads, head = n % p.heads;
  if (at >= p.all_rows) return;
  Placed row{};
  row.batch = p.rows_of_batch > 0 ? at / p.rows_of_batch : 0;
  row.row = p.rows_of_batch > 0 ? at % p.rows_of_batch : at;
  row = p.slots ? place_in_slot(p, row) : place_in_sequence(p, row);
  if (row.at.page < 0) return;
  write_row<From, To>(p, p.k, p.to_k, row, head);
  write_row<From, To>(p, p.v, p.to_v, row, head);
  write_bounds(p, row, head);
}

}  // namespace
}  // namespace flashmask::cuda

// The kernels, with names of their own; see KernelInfo. Elements that are stored as they are count by their bits.
using flashmask::cuda::AppendParams;
#define FLASHMASK_APPEND(name, From, To)                                           \
  extern "C" __global__ void __launch_bounds__(flashmask::cuda::kThreads)          \
      flashmask_sm90_cache_append_##name(const __grid_constant__ AppendParams p) { \
    flashmask::cuda::append<From, To>(p);                                          \
  }
FLASHMASK_APPEND(16, uint16_t, uint16_t)
FLASHMASK_APPEND(32, uint32_t, uint32_t)
FLASHMASK_APPEND(64, uint64_t, uint64_t)
FLASHMASK_APPEND(f32_e4m3, float, __nv_fp8_storage_t)
FLASHMASK_APPEND(bf16_e4m3, __nv_bfloat16, __nv_fp8_storage_t)
FLASHMASK_APPEND(f16_e4m3, __half, __nv_fp8_storage_t)
#undef FLASHMASK_APPEND

namespace flashmask::cuda {
namespace {

using AppendKernel = void (*)(AppendParams);

AppendKernel kernel_of(const CachedProblem& p) {
  if (p.cache_dtype != DataType::kFloat8E4M3) {
    const auto bytes = element_size(p.dtype);
    return bytes == 2   ? flashmask_sm90_cache_append_16
           : bytes == 4 ? flashmask_sm90_cache_append_32
                        : flashmask_sm90_cache_append_64;
  }
  if (p.dtype == DataType::kFloat32) return flashmask_sm90_cache_append_f32_e4m3;
  if (p.dtype == DataType::kBFloat16) return flashmask_sm90_cache_append_bf16_e4m3;
  if (p.dtype == DataType::kFloat16) return flashmask_sm90_cache_append_f16_e4m3;
  throw_unsupported("k is ", name(p.dtype), "; a float8 cache on a device takes float32, bfloat16 and float16");
}

NewRows rows_of(const TensorView& t) {
  const auto& s = t.stride;
  return t.rank == 4 ? NewRows{t.data, s[0], s[1], s[2], s[3]} : NewRows{t.data, 0, s[0], s[1], s[2]};
}
Stored stored(const TensorView& t, const TensorView& scale) {
  return {t.data,
          t.stride[0],
          t.stride[1],
          t.stride[2],
          static_cast<float*>(scale.data),
          {scale.stride[0], scale.stride[1], scale.stride[2]},
          static_cast<int32_t>(t.shape[3])};
}

}  // namespace

void launch_append(const AppendProblem& a) {
  const CachedProblem& p = a.call;
  const bool has_batch = a.k.rank == 4;
  AppendParams params{.call = p.view,
                      .k = rows_of(a.k),
                      .v = rows_of(a.v),
                      .bounds = rows_of(a.bounds),
                      .to_k = stored(p.cache.k, p.cache.k_scale),
                      .to_v = stored(p.cache.v, p.cache.v_scale),
                      .all_rows = has_batch ? p.batch * p.rows : p.rows,
                      .rows_of_batch = has_batch ? p.rows : 0,
                      .slots = a.slots.data,
                      .slots_batch_stride = has_batch ? a.slots.stride[0] : 0,
                      .slots_row_stride = a.slots.stride[has_batch ? 1 : 0],
                      .slots_are_long = a.slots.dtype == DataType::kInt64,
                      .heads = static_cast<int32_t>(p.heads_kv),
                      .bound_heads = a.bounds.defined() ? static_cast<int32_t>(a.bounds.shape[a.bounds.rank - 2]) : 0,
                      .write_scales = a.write_scales};
  LaunchChain(static_cast<cudaStream_t>(p.stream), LaunchChain::kOverlapPrevious)
      .launch("launch of the kernel that appends to a cache", kernel_of(p),
              ceil_div(params.all_rows * p.heads_kv, int64_t{kWarps}), kThreads, params);
}

std::vector<KernelInfo> append_kernels() {
  std::vector<KernelInfo> all;
  for (const char* what : {"16", "32", "64", "f32_e4m3", "bf16_e4m3", "f16_e4m3"})
    all.push_back(named({.id = message("sm90.cache.append_", what), .op = "cache", .threads = kThreads}));
  return all;
}

}  // namespace flashmask::cuda
