// SPDX-License-Identifier: Apache-2.0
#include "cache/check_cache.h"

#include <algorithm>
#include <utility>

#include "call/requirements.h"
#include "common/arithmetic.h"
#include "common/message.h"
#include "common/tensor_checks.h"
#include "flashmask/mask.h"
#include "mask/host_only.h"

namespace flashmask {

void check_readable(const CachedProblem& p, const char* argument, const TensorView& t, bool with_data) {
  check_extent(argument, t);
  check_strides(argument, t, false, false);
  check_device(argument, t, p.device);
  if (with_data) check_data(argument, t);
}

bool has_shape(const TensorView& t, std::initializer_list<int64_t> shape) {
  return t.rank == static_cast<int32_t>(shape.size()) && std::equal(shape.begin(), shape.end(), t.shape.begin());
}

void check_cu_seqlens(const CachedProblem& p, const char* argument, bool with_data) {
  const TensorView& t = p.cu_seqlens_q;
  check_int32(p, argument, t, with_data, t.rank == 1 && t.shape[0] >= 1, "[batch + 1]");
}

namespace {

/// Throws unless k and v are the keys and values of one cache, and reads its sizes.
void read_cache(CachedProblem& p, bool with_data) {
  const TensorView &k = p.cache.k, &v = p.cache.v;
  for (const auto& [argument, t] : {std::pair<const char*, const TensorView&>{"cache.k", k}, {"cache.v", v}}) {
    if (t.rank != 4)
      throw_invalid(argument, " is ", describe(t),
                    "; it must have 4 dimensions, [pages, page_size, heads_kv, dim], or without page_table [batch, "
                    "keys, heads_kv, dim]");
    check_extent(argument, t);
    const bool is_float8 = t.dtype == DataType::kFloat8E4M3 || t.dtype == DataType::kUInt8;
    if (t.dtype != p.dtype && !is_float8)
      throw_invalid(argument, " is ", describe(t), "; it must be ", name(p.dtype),
                    " as the rows are, or float8_e4m3 (as such or as uint8)");
  }
  p.pages = k.shape[0];
  p.page_size = k.shape[1];
  p.heads_kv = k.shape[2];
  p.head_dim_v = v.shape[3];
  p.cache_dtype = k.dtype == DataType::kUInt8 ? DataType::kFloat8E4M3 : k.dtype;
  check_heads(p.heads_q, p.heads_kv);
  check_head_dims(p.head_dim, p.head_dim_v);
  check_tensor("cache.k", k,
               {{p.pages, p.page_size, p.heads_kv, p.head_dim},
                "pages, page_size, heads_kv, q's head_dim",
                k.dtype,
                true,
                false},
               p.device, with_data);
  check_tensor("cache.v", v,
               {{p.pages, p.page_size, p.heads_kv, p.head_dim_v},
                "k's pages, page_size and heads_kv, head_dim_v",
                k.dtype,
                true,
                false},
               p.device, with_data);
}

/// Throws unless the tables fit the cache, and finds out how many keys a request has room for.
void read_tables(CachedProblem& p, bool with_data) {
  const KvCacheView& c = p.cache;
  if (c.page_indptr.defined() != c.page_indices.defined())
    throw_invalid("page_", c.page_indptr.defined() ? "indices" : "indptr",
                  " is absent; page_indptr and page_indices "
                  "come together");
  if (c.page_table.defined() && c.page_indptr.defined())
    throw_invalid("page_table and page_indptr are both given; one of them is a table");
  int64_t entries = 1;
  if (c.page_table.defined()) {
    const TensorView& t = c.page_table;
    check_int32(p, "page_table", t, with_data, t.rank == 2 && t.shape[0] == p.batch, "[", p.batch, ", max_pages]");
    entries = t.shape[1];
  } else if (c.page_indptr.defined()) {
    check_int32(p, "page_indptr", c.page_indptr, with_data, has_shape(c.page_indptr, {p.batch + 1}), "[", p.batch + 1,
                "]");
    check_int32(p, "page_indices", c.page_indices, with_data, c.page_indices.rank == 1, "[entries]");
    entries = c.page_indices.shape[0];
  } else if (p.pages != p.batch) {
    throw_invalid("cache.k is ", describe(c.k), "; without page_table its first dimension must be the batch, ",
                  p.batch);
  }
  if (p.page_size < 1 && p.has_tables()) throw_invalid("cache.k is ", describe(c.k), "; page_size must be at least 1");
  const int64_t most = kMaxSeqlen / (p.heads_q / p.heads_kv);
  const auto room = checked_product(entries, p.page_size);
  // Lists of pages hold all requests', of which one could have all.
  if (!room || (*room > most && !c.page_indptr.defined()))
    throw_invalid("the cache has room for ", entries, " x ", p.page_size, " keys in a request; it must be at most ",
                  most, ", 2^31 - 1 over the group of query heads");
  p.capacity = std::min(*room, most);
  if (c.seqlens.defined())
    check_int32(p, "seqlens", c.seqlens, with_data, has_shape(c.seqlens, {p.batch}), "[", p.batch, "]");
}

/// The scale with three dimensions, broadcast to [pages, page_size, heads_kv].
TensorView broadcast_scale(const CachedProblem& p, const char* argument, const TensorView& t, bool with_data) {
  if (!t.defined()) return t;
  if (p.cache_dtype != DataType::kFloat8E4M3)
    throw_invalid(argument, " is ", describe(t), "; only a float8_e4m3 cache has scales, and this one is ",
                  name(p.cache_dtype));
  TensorView scale = t;
  scale.rank = 3;
  bool fits = t.rank <= 3 && t.dtype == DataType::kFloat32;
  const int64_t full[] = {p.pages, p.page_size, p.heads_kv};
  for (int d = 2, from = t.rank - 1; d >= 0 && fits; --d, --from) {
    const int64_t size = from >= 0 ? t.shape[from] : 1;
    fits = size == full[d] || size == 1;
    scale.shape[d] = full[d];
    scale.stride[d] = size == 1 ? 0 : t.stride[from];
  }
  if (!fits)
    throw_invalid(argument, " is ", describe(t), "; it must be float32 and broadcast to [", p.pages, ", ", p.page_size,
                  ", ", p.heads_kv, "] (pages, page_size, heads_kv)");
  check_readable(p, argument, t, with_data);
  return scale;
}

void read_band(CachedProblem& p) {
  const SequenceMaskView& m = p.mask;
  const Band band = Band::window(m.window_left, m.window_right);
  if (band.lo) p.diagonal_lo = std::max(p.diagonal_lo, *band.lo);
  if (band.hi) p.diagonal_hi = std::min(p.diagonal_hi, *band.hi);
  if (m.causal) p.diagonal_hi = std::min<int64_t>(p.diagonal_hi, 0);
}

void check_bounds(const CachedProblem& p, bool with_data) {
  const SequenceMaskView& m = p.mask;
  if (!m.bounds.defined()) return;
  const TensorView& t = m.bounds;
  const bool fits_vectors = t.rank == 4 && (m.causal ? is_one_of(t.shape[3], {1, 2}) : is_one_of(t.shape[3], {2, 4}));
  const bool in_pages = m.key_layout == KeyLayout::kPages;
  const bool fits =
      fits_vectors &&
      (in_pages ? t.shape[0] == p.pages && t.shape[1] == p.page_size && is_one_of(t.shape[2], {1, p.heads_kv})
                : is_one_of(t.shape[0], {1, p.batch}) && is_one_of(t.shape[1], {1, p.heads_kv}));
  const char* const vectors = m.causal ? "1 or 2 (causal)" : "2 or 4 (not causal)";
  if (in_pages)
    check_int32(p, "bounds", t, with_data, fits, "[", p.pages, ", ", p.page_size, ", 1 or ", p.heads_kv, ", ", vectors,
                "], beside the pages");
  else
    check_int32(p, "bounds", t, with_data, fits, "[1 or ", p.batch, ", 1 or ", p.heads_kv, ", columns, ", vectors, "]");
}

void check_block_mask(const CachedProblem& p, bool with_data) {
  const TensorView& t = p.mask.block_mask;
  if (!t.defined()) return;
  const bool is_bytes = t.dtype == DataType::kBool || t.dtype == DataType::kUInt8;
  const bool fits =
      is_bytes && t.rank == 4 && is_one_of(t.shape[0], {1, p.batch}) && is_one_of(t.shape[1], {1, p.heads_kv});
  if (!fits)
    throw_invalid("block_mask is ", describe(t), "; it must be bool or uint8 [1 or ", p.batch, ", 1 or ", p.heads_kv,
                  ", row blocks, key blocks]");
  check_readable(p, "block_mask", t, with_data);
}

}  // namespace

void read_sequences(CachedProblem& p, bool with_data) {
  read_cache(p, with_data);
  read_tables(p, with_data);
  p.cache.k_scale = broadcast_scale(p, "k_scale", p.cache.k_scale, with_data);
  p.cache.v_scale = broadcast_scale(p, "v_scale", p.cache.v_scale, with_data);
  read_band(p);
  check_bounds(p, with_data);
  check_block_mask(p, with_data);
}

}  // namespace flashmask
