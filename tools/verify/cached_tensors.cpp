// SPDX-License-Identifier: Apache-2.0
#include "verify/cached_tensors.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "numerics/number.h"

namespace flashmask::verify {
namespace {

/// Streams of draws that choose how a call lies.
constexpr uint64_t kOrderStream = 11, kGarbageStream = 12;

int64_t pages_for(int64_t keys, int64_t page_size) { return (keys + page_size - 1) / page_size; }

void set_int32(const TensorView& t, int64_t offset, int32_t value) { static_cast<int32_t*>(t.data)[offset] = value; }

int64_t offset(const TensorView& t, std::initializer_list<int64_t> index) {
  int64_t sum = 0;
  std::size_t d = 0;
  for (const int64_t i : index) sum += i * t.stride[d++];
  return sum;
}

/// The view without its first dimension, which is 1.
TensorView without_batch(const TensorView& t) {
  TensorView view = t;
  --view.rank;
  for (std::size_t d = 0; d < static_cast<std::size_t>(view.rank); ++d) {
    view.shape[d] = t.shape[d + 1];
    view.stride[d] = t.stride[d + 1];
  }
  return view;
}

/// [a, b, c, d] seen as [a, c, b, d].
TensorView swapped(TensorView t) {
  std::swap(t.shape[1], t.shape[2]);
  std::swap(t.stride[1], t.stride[2]);
  return t;
}

void append_element(const TensorView& t, int64_t at, std::vector<std::byte>& bytes) {
  const std::size_t size = element_size(t.dtype);
  const auto* const data = static_cast<const std::byte*>(t.data) + static_cast<std::size_t>(at) * size;
  bytes.insert(bytes.end(), data, data + size);
}

/// No page of any cache.
int32_t draw_bad_page(Random& random, int64_t pages) {
  const int32_t values[] = {-1, static_cast<int32_t>(pages), INT32_MAX, INT32_MIN};
  return values[random.integer(0, 3)];
}

}  // namespace

CachedTensors::CachedTensors(const CachedDraw& draw, const CachedPlacement& placement, bool has_new_tokens)
    : draw_(draw), c_(draw.c), placement_(placement), has_new_tokens_(has_new_tokens) {
  order_pages();
  lay_rows();
  lay_tables();
  lay_keys();
  lay_columns();
  if (c_.tail > 0) lay_tail();
  if (c_.blocks != CachedBlocks::kNone) lay_blocks();
  lay_features();
  args_.mask.causal = c_.causal;
  args_.mask.window_left = c_.window.left;
  args_.mask.window_right = c_.window.right;
  args_.split_size = c_.split_size;
  args_.batch_invariant = c_.batch_invariant;
}

/// Gives each request its pages, in an order of their own, among pages of no request.
void CachedTensors::order_pages() {
  int64_t most = 0;
  for (const DrawnRequest& r : draw_.requests) most = std::max(most, r.keys);
  if (placement_.tables == CacheTables::kContiguous) {
    page_size_ = most + static_cast<int64_t>(c_.seed % 3);
    pages_ = c_.batch();
    return;
  }
  page_size_ = placement_.page_size;
  int64_t next = 0;
  for (const DrawnRequest& r : draw_.requests) {
    auto& pages = request_pages_.emplace_back();
    for (int64_t n = 0; n < pages_for(r.keys, page_size_); ++n) {
      const bool is_shared = (n + 1) * page_size_ <= std::min(placement_.shared, draw_.requests[0].keys) &&
                             static_cast<std::size_t>(n) < request_pages_[0].size() && request_pages_.size() > 1;
      pages.push_back(is_shared ? request_pages_[0][static_cast<std::size_t>(n)] : next++);
    }
  }
  pages_ = next + static_cast<int64_t>(c_.seed % 3);
  std::vector<int64_t> order(static_cast<std::size_t>(pages_));
  std::iota(order.begin(), order.end(), int64_t{0});
  Random random(mix(mix(c_.seed, kOrderStream), placement_.order));
  for (std::size_t n = order.size(); n > 1; --n)
    std::swap(order[n - 1], order[static_cast<std::size_t>(random.integer(0, static_cast<int64_t>(n) - 1))]);
  for (auto& pages : request_pages_) {
    for (int64_t& page : pages) page = order[static_cast<std::size_t>(page)];
  }
}

std::optional<CachedTensors::Place> CachedTensors::place(std::size_t b, int64_t j) const {
  if (placement_.tables == CacheTables::kContiguous) return Place{static_cast<int64_t>(b), j};
  if (draw_.requests[b].missing[static_cast<std::size_t>(j)]) return std::nullopt;
  return Place{request_pages_[b][static_cast<std::size_t>(j / page_size_)], j % page_size_};
}

TensorView CachedTensors::int32_tensor(std::initializer_list<int64_t> shape) {
  return own(Tensor::contiguous(DataType::kInt32, shape)).view();
}

/// First row of a request in a packed tensor.
int64_t CachedTensors::first_row(std::size_t b) const {
  int64_t row = 0;
  for (std::size_t n = 0; n < b; ++n) row += draw_.requests[n].rows;
  return row;
}

/// The keys, and their vectors, that are there from the beginning.
int64_t CachedTensors::laid_keys(const DrawnRequest& request) const {
  return has_new_tokens_ ? request.keys : std::max<int64_t>(request.first_row(), 0);
}

/// Offset of a row, counted over all requests, in a tensor [rows, ..] or [batch, m, ..].
int64_t CachedTensors::row_offset(const TensorView& t, int64_t row) const {
  if (c_.packed) return row * t.stride[0];
  const int64_t m = draw_.requests[0].rows;
  return row / m * t.stride[0] + row % m * t.stride[1];
}

void CachedTensors::lay_rows() {
  total_rows_ = first_row(draw_.requests.size());
  spare_rows_ = c_.packed ? static_cast<int64_t>(c_.seed % 4) : 0;
  const int64_t batch = c_.packed ? 1 : c_.batch(),
                rows = c_.packed ? total_rows_ + spare_rows_ : draw_.requests[0].rows;
  q_.emplace(Tensor::attention(c_.dtype, placement_.layout, batch, rows, c_.heads_q, c_.head_dim));
  out_.emplace(Tensor::attention(c_.dtype, placement_.layout, batch, rows, c_.heads_q, c_.head_dim_v));
  lse_.emplace(Tensor::lse(DataType::kFloat32, placement_.layout, batch, c_.heads_q, rows));
  const auto seen = [&](const TensorView& t) { return c_.packed ? without_batch(t) : t; };
  args_.q = seen(q_->view());
  args_.out = seen(out_->view());
  args_.lse = seen(lse_->view());
  for (std::size_t b = 0; b < draw_.requests.size(); ++b) {
    const DrawnRequest& r = draw_.requests[b];
    std::size_t at = 0;
    for (int64_t i = 0; i < r.rows; ++i) {
      for (int64_t h = 0; h < c_.heads_q; ++h) {
        const int64_t first = row_offset(args_.q, first_row(b) + i) + h * args_.q.stride[args_.q.rank - 2];
        for (int64_t x = 0; x < c_.head_dim; ++x) q_->set(first + x, r.q[at++]);
      }
    }
  }
  if (!c_.packed) return;
  args_.cu_seqlens_q = int32_tensor({c_.batch() + 1});
  for (std::size_t b = 0; b <= draw_.requests.size(); ++b)
    set_int32(args_.cu_seqlens_q, static_cast<int64_t>(b), static_cast<int32_t>(first_row(b)));
  if (!c_.bad || spare_rows_ > 0) return;
  set_int32(args_.cu_seqlens_q, 0, -3);
  set_int32(args_.cu_seqlens_q, c_.batch(), INT32_MAX);
}

void CachedTensors::lay_tables() {
  Random random(mix(c_.seed, kGarbageStream));
  std::vector<int64_t> rooms(draw_.requests.size(), page_size_);
  if (placement_.tables != CacheTables::kContiguous) rooms = lay_entries(random);
  args_.cache.seqlens = int32_tensor({c_.batch()});
  bool fills_rooms = true;
  for (std::size_t b = 0; b < rooms.size(); ++b) {
    int64_t n = draw_.requests[b].keys;
    fills_rooms = fills_rooms && rooms[b] == n;
    if (c_.bad && n == rooms[b] && random.flip()) n = random.flip() ? INT32_MAX : n + 1;
    if (c_.bad && n == 0 && random.flip()) n = random.flip() ? INT32_MIN : -1;
    set_int32(args_.cache.seqlens, static_cast<int64_t>(b), static_cast<int32_t>(n));
  }
  if (fills_rooms && c_.seed % 2 == 0) args_.cache.seqlens = {};
}

/// Writes each request's pages, and garbage behind the last and for missing ones. Returns the keys that each has room
/// for.
std::vector<int64_t> CachedTensors::lay_entries(Random& random) {
  const bool is_table = placement_.tables == CacheTables::kTable;
  std::size_t most = 0;
  for (const auto& pages : request_pages_) most = std::max(most, pages.size());
  const std::size_t max_pages = most + static_cast<std::size_t>(c_.seed % 2);
  if (is_table) args_.cache.page_table = int32_tensor({c_.batch(), static_cast<int64_t>(max_pages)});
  if (!is_table) lay_lists();
  const TensorView& to = is_table ? args_.cache.page_table : args_.cache.page_indices;
  std::vector<int64_t> rooms;
  int64_t entry = 0;
  for (std::size_t b = 0; b < request_pages_.size(); ++b) {
    const std::vector<int64_t>& pages = request_pages_[b];
    const std::size_t entries = is_table ? max_pages : pages.size();
    for (std::size_t n = 0; n < entries; ++n, ++entry) {
      const bool is_there = n < pages.size() && !draw_.requests[b].missing[n * static_cast<std::size_t>(page_size_)];
      set_int32(to, entry, is_there ? static_cast<int32_t>(pages[n]) : draw_bad_page(random, pages_));
    }
    rooms.push_back(static_cast<int64_t>(entries) * page_size_);
  }
  return rooms;
}

void CachedTensors::lay_lists() {
  args_.cache.page_indptr = int32_tensor({c_.batch() + 1});
  int64_t entries = 0;
  for (std::size_t b = 0; b < request_pages_.size(); ++b) {
    set_int32(args_.cache.page_indptr, static_cast<int64_t>(b), static_cast<int32_t>(entries));
    entries += static_cast<int64_t>(request_pages_[b].size());
  }
  set_int32(args_.cache.page_indptr, c_.batch(), c_.bad ? INT32_MAX : static_cast<int32_t>(entries));
  if (c_.bad) set_int32(args_.cache.page_indptr, 0, -1);
  args_.cache.page_indices = int32_tensor({entries});
}

void CachedTensors::lay_keys() {
  const DataType dtype = c_.cache_dtype();
  args_.cache.k = own(Tensor::attention(dtype, placement_.layout, pages_, page_size_, c_.heads_kv, c_.head_dim)).view();
  args_.cache.v =
      own(Tensor::attention(dtype, placement_.layout, pages_, page_size_, c_.heads_kv, c_.head_dim_v)).view();
  for (std::size_t b = 0; b < draw_.requests.size(); ++b) {
    for (int64_t j = 0; j < laid_keys(draw_.requests[b]); ++j) lay_key(b, j);
  }
  args_.cache.k_scale = lay_scales(c_.k_scale, &DrawnRequest::k_scale);
  args_.cache.v_scale = lay_scales(c_.v_scale, &DrawnRequest::v_scale);
  if (c_.float8 && c_.seed % 2 == 0) args_.cache.k.dtype = args_.cache.v.dtype = DataType::kUInt8;
}

void CachedTensors::lay_key(std::size_t b, int64_t j) {
  const auto at = place(b, j);
  if (!at) return;
  const DrawnRequest& r = draw_.requests[b];
  for (const auto& [t, values] : {std::pair{&args_.cache.k, &r.k}, {&args_.cache.v, &r.v}}) {
    const int64_t dim = t->shape[3];
    for (int64_t hk = 0; hk < c_.heads_kv; ++hk) {
      for (int64_t x = 0; x < dim; ++x)
        numerics::store(c_.cache_dtype(), t->data, offset(*t, {at->page, at->slot, hk, x}),
                        (*values)[static_cast<std::size_t>((j * c_.heads_kv + hk) * dim + x)]);
    }
  }
}

TensorView CachedTensors::lay_scales(ScaleShape shape, std::vector<float> DrawnRequest::* scales) {
  if (shape == ScaleShape::kNone) return {};
  const bool full = !placement_.broadcasts || shape == ScaleShape::kTokenHead;
  const bool by_slot = full || shape == ScaleShape::kToken, by_page = by_slot || shape == ScaleShape::kPage,
             by_head = full || shape == ScaleShape::kHead;
  TensorView t = own(Tensor::contiguous(DataType::kFloat32,
                                        {by_page ? pages_ : 1, by_slot ? page_size_ : 1, by_head ? c_.heads_kv : 1}))
                     .view();
  for (std::size_t b = 0; b < draw_.requests.size(); ++b) {
    const DrawnRequest& r = draw_.requests[b];
    for (int64_t j = 0; j < r.keys; ++j) {
      const auto at = place(b, j);
      if (!at && by_page) continue;  // others are read even if all keys lie in pages that are not there
      for (int64_t hk = 0; hk < c_.heads_kv; ++hk)
        static_cast<float*>(t.data)[offset(t, {by_page ? at->page : 0, by_slot ? at->slot : 0, by_head ? hk : 0})] =
            (r.*scales)[static_cast<std::size_t>(j * c_.heads_kv + hk)];
    }
  }
  if (by_page) return t;
  while (t.rank > 0 && t.shape[0] == 1) t = without_batch(t);  // dimensions of 1 in front may be left out
  return t;
}

void CachedTensors::lay_columns() {
  const bool in_pages = placement_.key_layout == KeyLayout::kPages;
  const int64_t entries = c_.vectors_by_request ? c_.batch() : 1, heads = c_.vector_heads();
  SequenceMaskView& mask = args_.mask;
  mask.key_layout = placement_.key_layout;
  if (c_.vectors > 0 && in_pages)
    mask.bounds =
        own(Tensor::attention(DataType::kInt32, placement_.layout, pages_, page_size_, heads, c_.vectors)).view();
  if (c_.vectors > 0 && !in_pages)
    mask.bounds = swapped(
        own(Tensor::attention(DataType::kInt32, placement_.layout, entries, draw_.columns, heads, c_.vectors)).view());
  if (c_.positions != CachedPositions::kNone) {
    mask.q_pos =
        c_.packed ? int32_tensor({total_rows_ + spare_rows_}) : int32_tensor({c_.batch(), draw_.requests[0].rows});
    int64_t at = 0;
    for (const DrawnRequest& r : draw_.requests) {
      for (const int32_t position : r.q_pos) set_int32(mask.q_pos, at++, position);
    }
  }
  if (c_.positions == CachedPositions::kRowsAndKeys)
    mask.k_pos = in_pages ? int32_tensor({pages_, page_size_}) : int32_tensor({entries, draw_.columns});
  for (std::size_t b = 0; b < draw_.requests.size(); ++b) {
    for (int64_t j = 0; j < draw_.requests[b].keys; ++j) {
      if (in_pages || j < draw_.columns) lay_column(b, j, in_pages ? place(b, j) : Place{0, 0});
    }
  }
}

void CachedTensors::lay_column(std::size_t b, int64_t j, const std::optional<Place>& at) {
  if (!at) return;
  const DrawnRequest& r = draw_.requests[b];
  const bool in_pages = placement_.key_layout == KeyLayout::kPages;
  const int64_t entry = c_.vectors_by_request ? static_cast<int64_t>(b) : 0;
  const SequenceMaskView& mask = args_.mask;
  const bool is_laid = c_.vectors > 0 && j < laid_keys(r);
  for (int64_t h = 0; h < c_.vector_heads() && is_laid; ++h) {
    for (int64_t n = 0; n < c_.vectors; ++n) {
      const int32_t value = r.bounds[static_cast<std::size_t>((h * r.keys + j) * c_.vectors + n)];
      set_int32(mask.bounds,
                in_pages ? offset(mask.bounds, {at->page, at->slot, h, n}) : offset(mask.bounds, {entry, h, j, n}),
                value);
    }
  }
  if (mask.k_pos.defined())
    set_int32(mask.k_pos, in_pages ? offset(mask.k_pos, {at->page, at->slot}) : offset(mask.k_pos, {entry, j}),
              r.k_pos[static_cast<std::size_t>(j)]);
}

void CachedTensors::lay_tail() {
  const int64_t words = (c_.tail + 31) / 32;
  SequenceMaskView& mask = args_.mask;
  mask.tail = int32_tensor({c_.batch(), c_.tail, words});
  if (c_.tail_lens) mask.tail_lens = int32_tensor({c_.batch()});
  if (c_.tail_depth) mask.tail_depth = int32_tensor({c_.batch(), c_.tail});
  for (std::size_t b = 0; b < draw_.requests.size(); ++b) {
    const DrawnRequest& r = draw_.requests[b];
    const auto entry = static_cast<int64_t>(b);
    if (c_.tail_lens) set_int32(mask.tail_lens, entry, r.tail_len);
    for (int64_t t = 0; t < c_.tail; ++t) {
      if (c_.tail_depth) set_int32(mask.tail_depth, entry * c_.tail + t, r.depth[static_cast<std::size_t>(t)]);
      for (int64_t w = 0; w < words; ++w) {
        uint32_t bits = 0;
        for (int64_t u = 32 * w; u < std::min(32 * w + 32, c_.tail); ++u)
          bits |= uint32_t{r.bits[static_cast<std::size_t>(t * c_.tail + u)]} << (u % 32);
        set_int32(mask.tail, (entry * c_.tail + t) * words + w, static_cast<int32_t>(bits));
      }
    }
  }
}

void CachedTensors::lay_blocks() {
  const DrawnRequest& first = draw_.requests[0];
  const DataType dtype = c_.seed % 2 == 0 ? DataType::kBool : DataType::kUInt8;
  TensorView& t = args_.mask.block_mask;
  t = own(Tensor::contiguous(dtype,
                             {c_.batch(), c_.blocks_by_head ? c_.heads_kv : 1, first.row_blocks, first.key_blocks}))
          .view();
  auto* at = static_cast<uint8_t*>(t.data);
  for (const DrawnRequest& r : draw_.requests) at = std::ranges::copy(r.block_mask, at).out;
}

void CachedTensors::lay_features() {
  features_ = numbers(c_.features);
  if (c_.sink) {
    Tensor& sink = own(Tensor::contiguous(DataType::kFloat32, {c_.heads_q}));
    for (int64_t h = 0; h < c_.heads_q; ++h) sink.set(h, draw_.sink[static_cast<std::size_t>(h)]);
    features_.sink = sink.view();
  }
  if (c_.features.alibi == AlibiKind::kNone) return;
  const bool each = c_.features.alibi == AlibiKind::kEach;
  Tensor& slopes = own(each ? Tensor::contiguous(DataType::kFloat32, {c_.batch(), c_.heads_q})
                            : Tensor::contiguous(DataType::kFloat32, {c_.heads_q}));
  int64_t at = 0;
  for (const DrawnRequest& r : draw_.requests) {
    for (const float slope : r.slopes) {
      if (at < slopes.size()) slopes.set(at++, slope);
    }
  }
  features_.alibi_slopes = slopes.view();
}

AppendArgs CachedTensors::append_args(bool by_slots) {
  const auto rows = [&](DataType dtype, int64_t heads, int64_t dim) {
    Tensor& t = c_.packed ? own(Tensor::contiguous(dtype, {total_rows_ + spare_rows_, heads, dim}))
                          : own(Tensor::contiguous(dtype, {c_.batch(), draw_.requests[0].rows, heads, dim}));
    return t.view();
  };
  AppendArgs args{.k = rows(c_.dtype, c_.heads_kv, c_.head_dim),
                  .v = rows(c_.dtype, c_.heads_kv, c_.head_dim_v),
                  .cu_seqlens = args_.cu_seqlens_q,
                  .cache = args_.cache,
                  .mask = args_.mask};
  if (c_.vectors > 0) args.bounds = rows(DataType::kInt32, c_.vector_heads(), c_.vectors);
  if (by_slots)
    args.slots =
        c_.packed ? int32_tensor({total_rows_ + spare_rows_}) : int32_tensor({c_.batch(), draw_.requests[0].rows});
  for (std::size_t b = 0; b < draw_.requests.size(); ++b) {
    const DrawnRequest& r = draw_.requests[b];
    for (int64_t i = std::max<int64_t>(-r.first_row(), 0); i < r.rows; ++i) append_row(args, b, i);
  }
  return args;
}

void CachedTensors::append_row(AppendArgs& args, std::size_t b, int64_t i) const {
  const DrawnRequest& r = draw_.requests[b];
  const int64_t j = r.first_row() + i, row = first_row(b) + i;
  const auto at = place(b, j);
  if (args.slots.defined())
    set_int32(args.slots, row, at ? static_cast<int32_t>(at->page * page_size_ + at->slot) : -1);
  const auto store_heads = [&](const TensorView& t, const std::vector<double>& values, const std::vector<float>& scales,
                               int64_t dim) {
    for (int64_t hk = 0; hk < c_.heads_kv; ++hk) {
      for (int64_t x = 0; x < dim; ++x)
        numerics::store(c_.dtype, t.data, (row * c_.heads_kv + hk) * dim + x,
                        values[static_cast<std::size_t>((j * c_.heads_kv + hk) * dim + x)] *
                            scales[static_cast<std::size_t>(j * c_.heads_kv + hk)]);
    }
  };
  store_heads(args.k, r.k, r.k_scale, c_.head_dim);
  store_heads(args.v, r.v, r.v_scale, c_.head_dim_v);
  for (int64_t h = 0; h < c_.vector_heads() && c_.vectors > 0; ++h) {
    for (int64_t n = 0; n < c_.vectors; ++n)
      set_int32(args.bounds, (row * c_.vector_heads() + h) * c_.vectors + n,
                r.bounds[static_cast<std::size_t>((h * r.keys + j) * c_.vectors + n)]);
  }
}

std::vector<std::byte> CachedTensors::out_bits(std::size_t b) const {
  std::vector<std::byte> bytes;
  const TensorView& t = args_.out;
  for (int64_t i = 0; i < draw_.requests[b].rows; ++i) {
    for (int64_t h = 0; h < c_.heads_q; ++h) {
      const int64_t first = row_offset(t, first_row(b) + i) + h * t.stride[t.rank - 2];
      for (int64_t x = 0; x < c_.head_dim_v; ++x) append_element(t, first + x, bytes);
    }
  }
  return bytes;
}

std::vector<std::byte> CachedTensors::lse_bits(std::size_t b) const {
  std::vector<std::byte> bytes;
  const TensorView& t = lse_->view();
  const int64_t entry = c_.packed ? 0 : static_cast<int64_t>(b), first = c_.packed ? first_row(b) : 0;
  for (int64_t i = 0; i < draw_.requests[b].rows; ++i) {
    for (int64_t h = 0; h < c_.heads_q; ++h) append_element(t, offset(t, {entry, h, first + i}), bytes);
  }
  return bytes;
}

RequestResults CachedTensors::results(std::size_t b) const {
  const int64_t rows = draw_.requests[b].rows;
  RequestResults results{HeadArray(1, c_.heads_q, rows, c_.head_dim_v), HeadArray(1, c_.heads_q, rows, 1), {}, {}, {}};
  const std::vector<std::byte> out = out_bits(b), lse = lse_bits(b);
  int64_t at = 0;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t h = 0; h < c_.heads_q; ++h) {
      results.lse.head(0, h)[static_cast<std::size_t>(i)] =
          numerics::load(DataType::kFloat32, lse.data(), i * c_.heads_q + h);
      for (int64_t x = 0; x < c_.head_dim_v; ++x)
        results.out.head(0, h)[static_cast<std::size_t>(i * c_.head_dim_v + x)] =
            numerics::load(c_.dtype, out.data(), at++);
    }
  }
  return results;
}

std::vector<std::byte> CachedTensors::cache_bits() const {
  std::vector<std::byte> bytes;
  for (const Tensor& t : tensors_) {
    const void* const data = t.view().data;
    if (data != args_.cache.k.data && data != args_.cache.v.data && data != args_.mask.bounds.data) continue;
    bytes.insert(bytes.end(), t.storage().begin(), t.storage().end());
  }
  return bytes;
}

bool CachedTensors::has_stray_writes() const {
  if (!out_->gaps_intact() || !lse_->gaps_intact()) return true;
  const auto is_poison = [](const TensorView& t, int64_t at) {
    std::vector<std::byte> element;
    append_element(t, at, element);
    return std::ranges::all_of(element, [](std::byte byte) { return byte == PoisonedBytes::kPoison; });
  };
  for (int64_t row = total_rows_; row < total_rows_ + spare_rows_; ++row) {
    for (int64_t h = 0; h < c_.heads_q; ++h) {
      if (!is_poison(lse_->view(), offset(lse_->view(), {0, h, row}))) return true;
      for (int64_t x = 0; x < c_.head_dim_v; ++x) {
        if (!is_poison(out_->view(), offset(out_->view(), {0, row, h, x}))) return true;
      }
    }
  }
  return false;
}

void CachedTensors::poison_outputs() {
  out_->poison();
  lse_->poison();
}

std::vector<TensorView*> every_tensor(CachedForwardArgs& a, Features& features) {
  KvCacheView& cache = a.cache;
  SequenceMaskView& mask = a.mask;
  return {&a.q,
          &a.out,
          &a.lse,
          &a.cu_seqlens_q,
          &cache.k,
          &cache.v,
          &cache.page_table,
          &cache.page_indptr,
          &cache.page_indices,
          &cache.seqlens,
          &cache.k_scale,
          &cache.v_scale,
          &mask.bounds,
          &mask.tail,
          &mask.tail_lens,
          &mask.tail_depth,
          &mask.q_pos,
          &mask.k_pos,
          &mask.block_mask,
          &features.sink,
          &features.alibi_slopes};
}

}  // namespace flashmask::verify
