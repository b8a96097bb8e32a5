// SPDX-License-Identifier: Apache-2.0
#pragma once

// Appends that write scales of pages. A page has one scale for all of its tokens, old and new, so all of its rows in a
// call are one block's, which is that of the first of them.

#include <cmath>

#include "backends/cuda/cache/append_rows.cuh"
#include "backends/cuda/device/launch_overlap.cuh"
#include "cache/page_scale.h"

namespace flashmask::cuda {

/// The largest number that a thread of the block brings. All threads call it.
__device__ inline uint32_t block_max(uint32_t x) {
  __shared__ uint32_t of_warps[kAppendWarps];
  x = __reduce_max_sync(0xffffffff, x);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = x;
  __syncthreads();
  for (const uint32_t of_warp : of_warps) x = x > of_warp ? x : of_warp;
  __syncthreads();  // The next call writes there.
  return x;
}

/// The new rows of a page, of the call's [first, end); between them may lie others'.
struct PageRows {
  int64_t page, first, end;
  int64_t stored_slots;  ///< slots that may hold tokens of earlier calls
};

/// The rows of the page that the call's n-th row lies in; none if it is not their first.
__device__ inline PageRows page_rows(const AppendParams& p, int64_t n, const Placed& row) {
  const KeyPlace& at = row.at;
  if (!p.slots) {
    const RequestRows rows = SequenceView(p.call, row.request).rows();
    const int64_t i = row.row - rows.begin, room = p.call.page_size - at.slot, left = rows.count - i;
    const bool is_first = i == 0 || at.slot == 0;
    return {at.page, n, is_first ? n + (room < left ? room : left) : n, at.slot};
  }
  bool is_first = true;
  for (int64_t end = n; end > 0 && is_first; end -= kAppendThreads) {  // slots mostly ascend: the row before tells
    const int64_t before = end - 1 - threadIdx.x;
    is_first = !block_max(before >= 0 && placed_row(p, before).at.page == at.page);
  }
  return {at.page, n, is_first ? p.all_rows : n, p.call.page_size};
}

/// The row that a lane of the warp has found.
__device__ __forceinline__ Placed lane_row(const Placed& own, int lane) {
  const auto of_lane = [lane](int64_t x) { return __shfl_sync(0xffffffff, x, lane); };
  return {of_lane(own.batch),
          of_lane(own.row),
          of_lane(own.request),
          of_lane(own.key),
          {of_lane(own.at.page), of_lane(own.at.slot)}};
}

/// Calls visit(row) for each of the page's rows by a warp.
template <typename Visit>
__device__ __forceinline__ void for_each_row(const AppendParams& p, const PageRows& rows, const Visit& visit) {
  const int64_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int64_t from = rows.first + warp; from < rows.end; from += kAppendThreads) {
    const int64_t n = from + lane * kAppendWarps;
    const Placed own = n < rows.end ? placed_row(p, n) : Placed{};
    uint32_t left = __ballot_sync(0xffffffff, own.at.page == rows.page);
    for (; left != 0; left &= left - 1) visit(lane_row(own, __ffs(static_cast<int>(left)) - 1));
  }
}

/// Halves what some heads of the page hold.
__device__ inline void halve_stored(const Stored& stored, const PageRows& rows, int32_t first_head, int32_t end_head,
                                    int32_t times) {
  auto* const page = static_cast<__nv_fp8_storage_t*>(stored.data) + rows.page * stored.page_stride;
  for (int64_t slot = threadIdx.x / 32; slot < rows.stored_slots; slot += kAppendWarps) {
    for (int32_t head = first_head; head < end_head; ++head) {
      auto* const to = page + slot * stored.slot_stride + head * stored.head_stride;
      for (auto c = static_cast<int32_t>(threadIdx.x % 32); c < stored.columns; c += 32)
        to[c] = halved_e4m3(to[c], times);
    }
  }
}

/// Writes the page's rows of some heads that share a scale, and the scale.
template <typename From>
__device__ void write_heads(const AppendParams& p, const NewRows& from, const Stored& to, const PageRows& rows,
                            int32_t first_head, int32_t end_head) {
  float largest = 0;
  bool begins = false;
  for_each_row(p, rows, [&](const Placed& row) {
    begins |= row.at.slot == 0;
    for (int32_t head = first_head; head < end_head; ++head) {
      const From* const x = new_row<From>(from, row, head);
      for (auto c = static_cast<int32_t>(threadIdx.x % 32); c < to.columns; c += 32) {
        const double magnitude = finite_magnitude(static_cast<float>(x[c * from.column_stride]));
        largest = fmaxf(largest, static_cast<float>(magnitude));
      }
    }
  });
  // Numbers that are not negative are in the order of their bits.
  largest = __uint_as_float(block_max(__float_as_uint(largest)));
  begins = block_max(begins) != 0;
  float* const scale = to.scale_at({rows.page, 0}, first_head);
  const PageScale grown = grown_page_scale(*scale, begins, largest);
  __syncthreads();  // All have read the old scale.
  if (threadIdx.x == 0) *scale = grown.scale;
  if (grown.halvings > 0) halve_stored(to, rows, first_head, end_head, grown.halvings);
  __syncthreads();  // New rows may lie in slots that were halved.
  for_each_row(p, rows, [&](const Placed& row) {
    for (int32_t head = first_head; head < end_head; ++head)
      convert_row<From, __nv_fp8_storage_t>(from, to, row, head, [&] { return static_cast<double>(grown.scale); });
  });
}

/// Writes the page's rows of k or v, and the scales.
template <typename From>
__device__ void write_page(const AppendParams& p, const NewRows& from, const Stored& to, const PageRows& rows) {
  const bool of_tokens = p.call.page_size == 1 || to.scale_strides[1] != 0;
  if (of_tokens) {
    for_each_row(p, rows, [&](const Placed& row) {
      for (int32_t head = 0; head < p.heads; ++head) write_row<From, __nv_fp8_storage_t>(p, from, to, row, head);
    });
    return;
  }
  const int32_t sharing = to.heads_share() ? p.heads : 1;
  for (int32_t head = 0; head < p.heads; head += sharing) write_heads<From>(p, from, to, rows, head, head + sharing);
}

/// Appends the page that the call's n-th row is the first of.
template <typename From>
__device__ __forceinline__ void append_page_of(const AppendParams& p, int64_t n, bool is_v) {
  const Placed first = placed_row(p, n);
  if (first.at.page < 0) return;
  const PageRows rows = page_rows(p, n, first);
  if (rows.first == rows.end) return;
  if (is_v) return write_page<From>(p, p.v, p.to_v, rows);
  write_page<From>(p, p.k, p.to_k, rows);
  if (!p.bounds.data) return;
  for_each_row(p, rows, [&](const Placed& row) {
    for (int32_t head = 0; head < p.bound_heads; ++head) write_bounds(p, row, head);
  });
}

/// A block for k and one for v of each row, up to so many rows; then they go on to others. Most rows are not their
/// page's first.
inline constexpr int64_t kMostRowsAtOnce = 1024;

template <typename From>
__device__ __forceinline__ void append_pages(const AppendParams& p) {
  wait_for_previous();
  allow_next();
  for (int64_t n = blockIdx.x / 2; n < p.all_rows; n += gridDim.x / 2) append_page_of<From>(p, n, blockIdx.x % 2 == 1);
}

}  // namespace flashmask::cuda
