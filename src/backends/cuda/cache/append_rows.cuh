// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "cache/token_scale.h"
#include "call/sequence_view.h"

namespace flashmask::cuda {

inline constexpr int kAppendThreads = 256, kAppendWarps = kAppendThreads / 32;

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

/// A new row and where it goes.
struct Placed {
  int64_t batch, row;  ///< in the new rows' tensors
  int64_t request, key;
  KeyPlace at{-1, 0};
};

/// The request that a packed row is of; the batch if it is none's.
__device__ inline int64_t request_of(const CachedView& call, int64_t row) {
  int64_t low = 0, high = call.batch;  // the last one that begins at or before the row
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (call.cu_seqlens_q.at(middle) <= row ? low : high) = middle;
  }
  return low;
}

__device__ inline Placed place_in_sequence(const AppendParams& p, Placed row) {
  row.request = p.rows_of_batch > 0 ? row.batch : request_of(p.call, row.row);
  if (row.request >= p.call.batch) return row;
  const SequenceView sequence(p.call, row.request);
  const int64_t i = row.row - sequence.rows().begin;
  row.key = sequence.first_row() + i;
  if (i >= 0 && i < sequence.rows().count && row.key >= 0) row.at = sequence.place(row.key);
  return row;
}

__device__ inline Placed place_in_slot(const AppendParams& p, Placed row) {
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

/// Writes a head of a token, by a warp, with the scale that scale() gives.
template <typename From, typename To, typename Scale>
__device__ __forceinline__ void convert_row(const NewRows& rows, const Stored& stored, const Placed& row, int64_t head,
                                            const Scale& scale_of_row) {
  const From* const from = new_row<From>(rows, row, head);
  To* const to = static_cast<To*>(stored.data) + row.at.page * stored.page_stride + row.at.slot * stored.slot_stride +
                 head * stored.head_stride;
  const double scale = scale_of_row();
  for (int32_t c = static_cast<int32_t>(threadIdx.x % 32); c < stored.columns; c += 32)
    convert(from[c * rows.column_stride], scale, to[c]);
}
template <typename From, typename To>
__device__ void write_row(const AppendParams& p, const NewRows& rows, const Stored& stored, const Placed& row,
                          int64_t head) {
  convert_row<From, To>(rows, stored, row, head, [&] { return scale_of<From, To>(p, rows, stored, row, head); });
}

/// Writes the row's vectors to where the mask has those of its key.
__device__ inline void write_bounds(const AppendParams& p, const Placed& row, int64_t head) {
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

/// The call's n-th row, and where it goes.
__device__ __forceinline__ Placed placed_row(const AppendParams& p, int64_t n) {
  Placed row{};
  row.batch = p.rows_of_batch > 0 ? n / p.rows_of_batch : 0;
  row.row = p.rows_of_batch > 0 ? n % p.rows_of_batch : n;
  return p.slots ? place_in_slot(p, row) : place_in_sequence(p, row);
}

}  // namespace flashmask::cuda
