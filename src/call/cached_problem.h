// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "call/options.h"
#include "call/sequence_view.h"
#include "flashmask/attention.h"
#include "flashmask/kv_cache.h"

namespace flashmask {

/// A checked call over a cache, as the backends see it. q, out and lse have the dimensions of a packed call, [rows,
/// heads, dim] and [heads, rows], or four and three of an unpacked one; row_of() knows.
struct CachedProblem : CommonOptions {
  int64_t batch = 0, heads_q = 0, heads_kv = 0, head_dim = 0, head_dim_v = 0;
  int64_t rows = 0;      ///< each request's, or with cu_seqlens_q those of all together
  int64_t capacity = 0;  ///< keys that a request has room for; of lists of pages the longest there can be
  int64_t page_size = 0, pages = 0;
  DataType dtype = DataType::kNone, cache_dtype = DataType::kNone;
  Device device{};
  std::string_view kernels = "auto";  ///< as Options::kernels, in whose memory it is
  std::optional<GpuModel> gpu{};      ///< as Problem::gpu
  bool batch_invariant = false;
  int64_t split_size = kDefaultSplitSize;

  TensorView q, out, lse, cu_seqlens_q;
  KvCacheView cache;  ///< scales have three dimensions or are undefined
  SequenceMaskView mask;
  /// The band on the positions' difference, key - row, both ends inclusive.
  int64_t diagonal_lo = -kOpenDiagonal, diagonal_hi = kOpenDiagonal;
  const CachedPlan* plan = nullptr;
  CachedView view{};  ///< the tensors above, as far as they say where keys lie and what rows see

  bool is_packed() const { return cu_seqlens_q.defined(); }
  bool has_tables() const { return cache.page_table.defined() || cache.page_indptr.defined(); }
  int64_t group_size() const { return heads_q / heads_kv; }
  /// Most splits of a sequence.
  int64_t splits() const { return (capacity + split_size - 1) / split_size; }
  /// Rows that the tensors have, of all requests.
  int64_t total_rows() const { return is_packed() ? rows : batch * rows; }
  bool is_empty() const { return total_rows() == 0; }
  bool has_float8() const { return cache_dtype == DataType::kFloat8E4M3; }
};

/// True if rows may see other keys under one key head than under another.
bool differs_by_head(const SequenceMaskView& mask);

/// The view of a call whose other members are filled in.
CachedView view_of(const CachedProblem& problem);

/// First element of a request's row i, 0 <= i < its count, and head h in q or out.
template <typename T>
T* cached_row(const CachedProblem& p, const TensorView& t, int64_t b, const RequestRows& rows, int64_t i, int64_t h) {
  T* const data = static_cast<T*>(t.data);
  if (p.is_packed()) return data + (rows.begin + i) * t.stride[0] + h * t.stride[1];
  return data + b * t.stride[0] + i * t.stride[1] + h * t.stride[2];
}

/// Offset of the row's element in lse.
inline int64_t cached_lse_offset(const CachedProblem& p, int64_t b, const RequestRows& rows, int64_t i, int64_t h) {
  const auto& stride = p.lse.stride;
  return p.is_packed() ? h * stride[0] + (rows.begin + i) * stride[1] : b * stride[0] + h * stride[1] + i * stride[2];
}

/// The kinds of scales that an append writes.
enum class WrittenScales : int32_t { kNone, kOfTokens, kOfPages };

/// Rows to append, checked.
struct AppendProblem {
  CachedProblem call;  ///< its q is k's rows; out, lse and the options are not there
  TensorView k, v, slots, bounds;
  WrittenScales k_scales = WrittenScales::kNone, v_scales = WrittenScales::kNone;
};

}  // namespace flashmask
