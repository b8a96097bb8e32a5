// SPDX-License-Identifier: Apache-2.0
#pragma once

// A random call over a cache, drawn as numbers of sequences, heads and keys, and laid out in memory afterwards: so one
// call can lie in pages of any size and order. Its result is summed up from the numbers, by the rule as kv_cache.h
// writes it and without the library's own code.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <random>
#include <vector>

#include "flashmask/float16.h"
#include "flashmask/kv_cache.h"

namespace flashmask::test {

/// Sizes of a call, and what its mask and features have.
struct CachedShape {
  std::vector<int64_t> keys = {70, 5, 0, 200};  ///< n of each request
  std::vector<int64_t> rows = {3, 9, 2, 1};     ///< m of each; alike if not packed
  int64_t heads_q = 4, heads_kv = 2, head_dim = 24, head_dim_v = 24;
  bool packed = true;
  bool causal = true;
  int64_t window_left = -1, window_right = -1;
  int vectors = 0;
  bool vectors_by_head = false;
  int64_t tail = 0;
  bool has_tail_lens = false, has_depth = false, has_positions = false;
  int64_t row_blocks = 0, key_blocks = 0;  ///< a block mask has; 0: there is none
  bool blocks_by_head = false;
  bool has_sink = false, has_alibi = false, has_scales = false;
  double softcap = 0;
  DataType dtype = DataType::kFloat32, cache_dtype = DataType::kFloat32;
};

/// How it lies.
struct CachedPlacement {
  int64_t page_size = 16;  ///< 0: contiguous
  bool lists = false;      ///< page_indptr and page_indices in place of a table
  bool heads_first = false;
  bool in_pages = true;  ///< bounds and k_pos
  uint32_t order = 1;
};

inline double rounded(double x, DataType dtype) {
  const auto value = static_cast<float>(x);
  if (dtype == DataType::kBFloat16) return bfloat16_to_float(float_to_bfloat16(value));
  if (dtype == DataType::kFloat16) return float16_to_float(float_to_float16(value));
  if (dtype == DataType::kFloat8E4M3) return float8_e4m3_to_float(float_to_float8_e4m3(value));
  return value;
}

/// Memory of a tensor of any dtype.
struct Storage {
  std::vector<std::byte> bytes;
  TensorView view;

  Storage() = default;
  Storage(DataType dtype, std::initializer_list<int64_t> shape) {
    view = TensorView::contiguous(nullptr, dtype, shape);
    bytes.resize(static_cast<std::size_t>(view.num_elements()) * element_size(dtype), std::byte{0xff});  // NaN
    view.data = bytes.data();
  }
  Storage(const Storage&) = delete;
  Storage(Storage&& from) noexcept : bytes(std::move(from.bytes)), view(from.view) { view.data = bytes.data(); }
  Storage& operator=(Storage&& from) noexcept {
    bytes = std::move(from.bytes);
    view = from.view;
    view.data = bytes.data();
    return *this;
  }
  void set(int64_t at, double x) {
    if (view.dtype == DataType::kFloat32) reinterpret_cast<float*>(bytes.data())[at] = static_cast<float>(x);
    if (view.dtype == DataType::kFloat64) reinterpret_cast<double*>(bytes.data())[at] = x;
    if (view.dtype == DataType::kInt32) reinterpret_cast<int32_t*>(bytes.data())[at] = static_cast<int32_t>(x);
    auto* halves = reinterpret_cast<uint16_t*>(bytes.data());
    if (view.dtype == DataType::kBFloat16) halves[at] = float_to_bfloat16(static_cast<float>(x));
    if (view.dtype == DataType::kFloat16) halves[at] = float_to_float16(static_cast<float>(x));
    if (view.dtype == DataType::kFloat8E4M3)
      reinterpret_cast<uint8_t*>(bytes.data())[at] = float_to_float8_e4m3(static_cast<float>(x));
  }
  double get(int64_t at) const {
    if (view.dtype == DataType::kFloat32) return reinterpret_cast<const float*>(bytes.data())[at];
    if (view.dtype == DataType::kFloat64) return reinterpret_cast<const double*>(bytes.data())[at];
    const auto bits = reinterpret_cast<const uint16_t*>(bytes.data())[at];
    return view.dtype == DataType::kBFloat16 ? bfloat16_to_float(bits) : float16_to_float(bits);
  }
  /// Element of five indices at most.
  int64_t at(std::initializer_list<int64_t> index) const {
    int64_t offset = 0;
    int d = 0;
    for (const int64_t i : index) offset += i * view.stride[static_cast<std::size_t>(d++)];
    return offset;
  }
};

struct CachedSequence {
  std::vector<double> q, k, v;  ///< [m, heads_q, d], [n, heads_kv, d], [n, heads_kv, dv]; the cache's without scales
  std::vector<int32_t> bounds;  ///< [heads, n, vectors]
  std::vector<int32_t> q_pos, k_pos, depth;
  std::vector<uint8_t> tail;    ///< [T, T]
  std::vector<uint8_t> blocks;  ///< [1 or heads_kv, row_blocks, key_blocks]
  int64_t tail_len = 0;
};

class CachedCase {
 public:
  CachedCase(const CachedShape& of, uint32_t seed) : shape(of), random_(seed) {
    for (std::size_t b = 0; b < shape.keys.size(); ++b) draw_sequence(b);
    for (int64_t h = 0; h < shape.heads_q; ++h) {
      sink.push_back(normal());
      slope.push_back(0.5 / static_cast<double>(h + 1));
    }
    for (int64_t h = 0; h < shape.heads_kv; ++h) {
      k_scale.push_back(shape.has_scales ? 0.5 + 0.25 * static_cast<double>(h) : 1);
      v_scale.push_back(shape.has_scales ? 2.0 / static_cast<double>(h + 1) : 1);
    }
  }

  int64_t batch() const { return static_cast<int64_t>(shape.keys.size()); }
  int64_t vector_heads() const { return shape.vectors_by_head ? shape.heads_kv : 1; }
  int64_t total_rows() const { return std::accumulate(shape.rows.begin(), shape.rows.end(), int64_t{0}); }

  /// True if row r (0 or more) of request b sees key j under key head hk.
  bool sees(int64_t b, int64_t r, int64_t j, int64_t hk) const {
    const CachedSequence& s = sequences[static_cast<std::size_t>(b)];
    const int64_t n = keys(b), begin = n - s.tail_len;
    const bool both_in_tail = r >= begin && j >= begin;
    const int64_t distance = key_position(b, j) - row_position(b, r);
    if (shape.window_left >= 0 && distance < -shape.window_left) return false;
    if (both_in_tail) {
      if (!s.tail[static_cast<std::size_t>((r - begin) * shape.tail + j - begin)]) return false;
    } else {
      if (shape.causal && distance > 0) return false;
      if (shape.window_right >= 0 && distance > shape.window_right) return false;
    }
    if (!block_is_visible(s, shape.row_blocks == 1 ? 0 : r / 128, j / 128, hk)) return false;
    if (shape.vectors == 0) return true;
    const int32_t* x = &s.bounds[static_cast<std::size_t>(((shape.vectors_by_head ? hk : 0) * n + j) * shape.vectors)];
    const auto in = [r](int64_t from, int64_t to) { return r >= from && r < to; };
    if (shape.causal) return !in(x[0], shape.vectors == 2 ? x[1] : INT32_MAX);
    return shape.vectors == 2 ? !in(x[0], INT32_MAX) && !in(0, x[1]) : !in(x[0], x[1]) && !in(x[2], x[3]);
  }

  /// out (head_dim_v numbers) and lse of a row and head, in float64.
  std::pair<std::vector<double>, double> expected(int64_t b, int64_t i, int64_t h) const {
    const CachedSequence& s = sequences[static_cast<std::size_t>(b)];
    const int64_t n = keys(b), r = n - rows(b) + i, hk = h / (shape.heads_q / shape.heads_kv);
    std::vector<double> scores(static_cast<std::size_t>(n), -kInfinity);
    double most = shape.has_sink ? sink[static_cast<std::size_t>(h)] : -kInfinity;
    for (int64_t j = 0; j < n && r >= 0; ++j) {
      if (!sees(b, r, j, hk)) continue;
      double x = 0;
      for (int64_t c = 0; c < shape.head_dim; ++c)
        x += s.q[index(i, shape.heads_q, h, shape.head_dim, c)] * s.k[index(j, shape.heads_kv, hk, shape.head_dim, c)];
      x *= k_scale[static_cast<std::size_t>(hk)] / std::sqrt(static_cast<double>(shape.head_dim));
      if (shape.softcap != 0) x = shape.softcap * std::tanh(x / shape.softcap);
      if (shape.has_alibi)
        x -= static_cast<float>(slope[static_cast<std::size_t>(h)]) *
             std::fabs(static_cast<double>(row_position(b, r) - key_position(b, j)));
      scores[static_cast<std::size_t>(j)] = x;
      most = std::max(most, x);
    }
    std::vector<double> out(static_cast<std::size_t>(shape.head_dim_v), 0.0);
    if (most == -kInfinity) return {out, -kInfinity};
    double sum = shape.has_sink ? std::exp(sink[static_cast<std::size_t>(h)] - most) : 0;
    for (int64_t j = 0; j < n; ++j) {
      const double weight = std::exp(scores[static_cast<std::size_t>(j)] - most);
      sum += weight;
      for (int64_t c = 0; c < shape.head_dim_v && weight > 0; ++c)
        out[static_cast<std::size_t>(c)] +=
            weight * v_scale[static_cast<std::size_t>(hk)] * s.v[index(j, shape.heads_kv, hk, shape.head_dim_v, c)];
    }
    for (double& x : out) x /= sum;
    return {out, most + std::log(sum)};
  }

  int64_t keys(int64_t b) const { return shape.keys[static_cast<std::size_t>(b)]; }
  int64_t rows(int64_t b) const { return shape.rows[static_cast<std::size_t>(b)]; }
  static std::size_t index(int64_t row, int64_t heads, int64_t h, int64_t dim, int64_t c) {
    return static_cast<std::size_t>((row * heads + h) * dim + c);
  }
  static constexpr double kInfinity = std::numeric_limits<double>::infinity();

  const CachedShape shape;
  std::vector<CachedSequence> sequences;
  std::vector<double> sink, slope, k_scale, v_scale;

 private:
  double normal() { return std::normal_distribution<double>()(random_); }
  int64_t below(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint32_t>(std::max<int64_t>(n, 1))); }

  bool block_is_visible(const CachedSequence& s, int64_t row_block, int64_t key_block, int64_t hk) const {
    if (row_block >= shape.row_blocks || key_block >= shape.key_blocks) return true;
    const int64_t head = shape.blocks_by_head ? hk : 0;
    return s.blocks[static_cast<std::size_t>((head * shape.row_blocks + row_block) * shape.key_blocks + key_block)];
  }
  int64_t row_position(int64_t b, int64_t r) const {
    const CachedSequence& s = sequences[static_cast<std::size_t>(b)];
    if (shape.has_positions) return s.q_pos[static_cast<std::size_t>(r - (keys(b) - rows(b)))];
    return of_tail(b, r);
  }
  int64_t key_position(int64_t b, int64_t j) const {
    if (shape.has_positions) return sequences[static_cast<std::size_t>(b)].k_pos[static_cast<std::size_t>(j)];
    return of_tail(b, j);
  }
  int64_t of_tail(int64_t b, int64_t at) const {
    const CachedSequence& s = sequences[static_cast<std::size_t>(b)];
    const int64_t begin = keys(b) - s.tail_len;
    return shape.has_depth && at >= begin ? begin + s.depth[static_cast<std::size_t>(at - begin)] : at;
  }

  void draw_sequence(std::size_t b) {
    CachedSequence& s = sequences.emplace_back();
    const int64_t n = shape.keys[b], m = shape.rows[b];
    for (int64_t x = 0; x < m * shape.heads_q * shape.head_dim; ++x) s.q.push_back(rounded(normal(), shape.dtype));
    for (int64_t x = 0; x < n * shape.heads_kv * shape.head_dim; ++x)
      s.k.push_back(rounded(normal(), shape.cache_dtype));
    for (int64_t x = 0; x < n * shape.heads_kv * shape.head_dim_v; ++x)
      s.v.push_back(rounded(normal(), shape.cache_dtype));
    for (int64_t x = 0; x < n * shape.vectors * vector_heads(); ++x)
      s.bounds.push_back(below(5) == 0 ? INT32_MAX : static_cast<int32_t>(below(2 * n)) - 3);
    for (int64_t i = 0; i < m; ++i) s.q_pos.push_back(static_cast<int32_t>(n - m + i + below(5)));
    for (int64_t j = 0; j < n; ++j) s.k_pos.push_back(static_cast<int32_t>(j + below(9)) - 4);
    for (int64_t x = 0; x < (shape.blocks_by_head ? shape.heads_kv : 1) * shape.row_blocks * shape.key_blocks; ++x)
      s.blocks.push_back(below(3) > 0);
    s.tail_len = std::min({shape.tail, n, shape.has_tail_lens ? below(shape.tail + 1) : m});
    for (int64_t t = 0; t < shape.tail; ++t) {
      s.depth.push_back(static_cast<int32_t>(below(t + 1)));
      for (int64_t u = 0; u < shape.tail; ++u) s.tail.push_back(below(2) == 0 || t == u);
    }
  }

  std::mt19937 random_;
};

}  // namespace flashmask::test
