// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <cstring>

#include "cache/cached_case.h"

namespace flashmask::test {

/// True if there is a device for calls on CUDA tensors.
inline bool has_cuda() {
  return std::ranges::any_of(backends(), [](const BackendInfo& b) { return b.name == "cuda" && b.usable; });
}

/// A case in memory, ready to be called. Slots that no key is in hold NaN, and pages that no table names.
class LaidOutCall {
 public:
  LaidOutCall(const CachedCase& c, const CachedPlacement& placement) : c_(c), placement_(placement) {
    place_keys();
    write_cache();
    write_rows();
    write_mask();
    options.softmax_scale = std::nullopt;
    options.features.softcap = c.shape.softcap;
    if (c.shape.has_sink) options.features.sink = numbers(sink_, c.sink);
    if (c.shape.has_alibi) options.features.alibi_slopes = numbers(slopes_, c.slope);
  }

  LaidOutCall& run() {
    std::vector<std::byte> workspace(cached_forward_workspace(args, options), std::byte{0xff});
    cached_forward(args, workspace, options);
    return *this;
  }

  /// Expects the case's own result.
  void expect_right(double tolerance) const {
    for (int64_t b = 0; b < c_.batch(); ++b) {
      for (int64_t i = 0; i < c_.rows(b); ++i) {
        for (int64_t h = 0; h < c_.shape.heads_q; ++h) {
          const auto [out, lse] = c_.expected(b, i, h);
          for (int64_t d = 0; d < c_.shape.head_dim_v; ++d)
            ASSERT_NEAR(out_.get(row(out_, b, i, h) + d), out[static_cast<std::size_t>(d)], tolerance)
                << "request " << b << " row " << i << " head " << h << " column " << d;
          const double got = lse_.get(lse_at(b, i, h));
          if (lse == -CachedCase::kInfinity)
            ASSERT_EQ(got, lse) << "lse of request " << b << " row " << i << " head " << h;
          else
            ASSERT_NEAR(got, lse, tolerance) << "lse of request " << b << " row " << i << " head " << h;
        }
      }
    }
  }

  /// out and lse of a request as bits.
  std::vector<std::byte> bits_of(int64_t b) const {
    std::vector<std::byte> bits;
    const auto add = [&](const Storage& s, int64_t at, int64_t n) {
      const auto size = static_cast<int64_t>(element_size(s.view.dtype));
      bits.insert(bits.end(), s.bytes.begin() + at * size, s.bytes.begin() + (at + n) * size);
    };
    for (int64_t i = 0; i < c_.rows(b); ++i) {
      for (int64_t h = 0; h < c_.shape.heads_q; ++h) {
        add(out_, row(out_, b, i, h), c_.shape.head_dim_v);
        add(lse_, lse_at(b, i, h), 1);
      }
    }
    return bits;
  }
  std::vector<std::byte> all_bits() const {
    std::vector<std::byte> bits;
    for (int64_t b = 0; b < c_.batch(); ++b) {
      const std::vector<std::byte> more = bits_of(b);
      bits.insert(bits.end(), more.begin(), more.end());
    }
    return bits;
  }

  /// The page and slot of a key.
  std::pair<int64_t, int64_t> place(int64_t b, int64_t j) const {
    if (placement_.page_size == 0) return {b, j};
    return {pages_[static_cast<std::size_t>(b)][static_cast<std::size_t>(j / placement_.page_size)],
            j % placement_.page_size};
  }

  CachedForwardArgs args;
  Options options;
  Storage table, indptr, seqlens, cu_seqlens, bounds, tail, tail_lens;

 private:
  static TensorView numbers(Storage& to, const std::vector<double>& from) {
    to = Storage(DataType::kFloat32, {static_cast<int64_t>(from.size())});
    for (std::size_t n = 0; n < from.size(); ++n) to.set(static_cast<int64_t>(n), from[n]);
    return to.view;
  }
  int64_t first_row(int64_t b) const {
    return std::accumulate(c_.shape.rows.begin(), c_.shape.rows.begin() + b, int64_t{0});
  }
  int64_t row(const Storage& s, int64_t b, int64_t i, int64_t h) const {
    return c_.shape.packed ? s.at({first_row(b) + i, h}) : s.at({b, i, h});
  }
  int64_t lse_at(int64_t b, int64_t i, int64_t h) const {
    return c_.shape.packed ? lse_.at({h, first_row(b) + i}) : lse_.at({b, h, i});
  }

  void place_keys() {
    const int64_t most = *std::max_element(c_.shape.keys.begin(), c_.shape.keys.end());
    if (placement_.page_size == 0) {
      page_count_ = c_.batch();
      slots_ = most + 7;
      return;
    }
    slots_ = placement_.page_size;
    int64_t used = 0;
    for (int64_t b = 0; b < c_.batch(); ++b) used += (c_.keys(b) + slots_ - 1) / slots_;
    page_count_ = used + 3;
    std::vector<int64_t> order(static_cast<std::size_t>(page_count_));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::mt19937(placement_.order));
    std::size_t next = 0;
    for (int64_t b = 0; b < c_.batch(); ++b) {
      auto& own = pages_.emplace_back();
      for (int64_t j = 0; j < c_.keys(b); j += slots_) own.push_back(order[next++]);
    }
    write_tables((most + slots_ - 1) / slots_ + 2);
  }
  void write_tables(int64_t width) {
    if (placement_.lists) {
      int64_t entries = 0;
      for (const auto& own : pages_) entries += static_cast<int64_t>(own.size());
      indptr = Storage(DataType::kInt32, {c_.batch() + 1});
      table = Storage(DataType::kInt32, {entries});
      int64_t at = 0;
      for (int64_t b = 0; b < c_.batch(); ++b) {
        indptr.set(b, static_cast<double>(at));
        for (const int64_t page : pages_[static_cast<std::size_t>(b)]) table.set(at++, static_cast<double>(page));
      }
      indptr.set(c_.batch(), static_cast<double>(at));
      args.cache.page_indptr = indptr.view;
      args.cache.page_indices = table.view;
      return;
    }
    table = Storage(DataType::kInt32, {c_.batch(), width});  // entries past a request's keys: -1
    for (int64_t b = 0; b < c_.batch(); ++b) {
      const auto& own = pages_[static_cast<std::size_t>(b)];
      for (std::size_t n = 0; n < own.size(); ++n)
        table.set(b * width + static_cast<int64_t>(n), static_cast<double>(own[n]));
    }
    args.cache.page_table = table.view;
  }

  Storage new_cache(int64_t dim) const {
    const CachedShape& s = c_.shape;
    if (!placement_.heads_first) return Storage(s.cache_dtype, {page_count_, slots_, s.heads_kv, dim});
    Storage cache(s.cache_dtype, {page_count_, s.heads_kv, slots_, dim});
    std::swap(cache.view.shape[1], cache.view.shape[2]);
    std::swap(cache.view.stride[1], cache.view.stride[2]);
    return cache;
  }
  void write_cache() {
    const CachedShape& s = c_.shape;
    k_ = new_cache(s.head_dim);
    v_ = new_cache(s.head_dim_v);
    seqlens = Storage(DataType::kInt32, {c_.batch()});
    for (int64_t b = 0; b < c_.batch(); ++b) {
      seqlens.set(b, static_cast<double>(c_.keys(b)));
      const CachedSequence& from = c_.sequences[static_cast<std::size_t>(b)];
      for (int64_t j = 0; j < c_.keys(b); ++j) {
        const auto [page, slot] = place(b, j);
        for (int64_t h = 0; h < s.heads_kv; ++h) {
          for (int64_t d = 0; d < s.head_dim; ++d)
            k_.set(k_.at({page, slot, h, d}), from.k[CachedCase::index(j, s.heads_kv, h, s.head_dim, d)]);
          for (int64_t d = 0; d < s.head_dim_v; ++d)
            v_.set(v_.at({page, slot, h, d}), from.v[CachedCase::index(j, s.heads_kv, h, s.head_dim_v, d)]);
        }
      }
    }
    args.cache.k = k_.view;
    args.cache.v = v_.view;
    args.cache.seqlens = seqlens.view;
    if (s.has_scales) {
      args.cache.k_scale = numbers(k_scale_, c_.k_scale);
      args.cache.v_scale = numbers(v_scale_, c_.v_scale);
    }
  }
  void write_rows() {
    const CachedShape& s = c_.shape;
    const DataType lse = s.dtype == DataType::kFloat64 ? DataType::kFloat64 : DataType::kFloat32;
    if (s.packed) {
      q_ = Storage(s.dtype, {c_.total_rows() + 2, s.heads_q, s.head_dim});
      out_ = Storage(s.dtype, {c_.total_rows() + 2, s.heads_q, s.head_dim_v});
      lse_ = Storage(lse, {s.heads_q, c_.total_rows() + 2});
      cu_seqlens = Storage(DataType::kInt32, {c_.batch() + 1});
      for (int64_t b = 0; b <= c_.batch(); ++b) cu_seqlens.set(b, static_cast<double>(first_row(b)));
      args.cu_seqlens_q = cu_seqlens.view;
    } else {
      q_ = Storage(s.dtype, {c_.batch(), c_.rows(0), s.heads_q, s.head_dim});
      out_ = Storage(s.dtype, {c_.batch(), c_.rows(0), s.heads_q, s.head_dim_v});
      lse_ = Storage(lse, {c_.batch(), s.heads_q, c_.rows(0)});
    }
    for (int64_t b = 0; b < c_.batch(); ++b) {
      for (int64_t i = 0; i < c_.rows(b); ++i) {
        for (int64_t h = 0; h < s.heads_q; ++h) {
          for (int64_t d = 0; d < s.head_dim; ++d)
            q_.set(row(q_, b, i, h) + d,
                   c_.sequences[static_cast<std::size_t>(b)].q[CachedCase::index(i, s.heads_q, h, s.head_dim, d)]);
        }
      }
    }
    args.q = q_.view;
    args.out = out_.view;
    args.lse = lse_.view;
  }

  void write_mask() {
    const CachedShape& s = c_.shape;
    SequenceMaskView& m = args.mask;
    m.causal = s.causal;
    m.window_left = s.window_left;
    m.window_right = s.window_right;
    m.key_layout = placement_.in_pages ? KeyLayout::kPages : KeyLayout::kSequences;
    if (s.vectors > 0) write_bounds();
    if (s.tail > 0) write_tail();
    if (s.has_positions) write_positions();
    if (s.row_blocks > 0) write_blocks();
  }
  void write_blocks() {
    const CachedShape& s = c_.shape;
    blocks_ = Storage(DataType::kUInt8, {c_.batch(), s.blocks_by_head ? s.heads_kv : 1, s.row_blocks, s.key_blocks});
    auto* at = reinterpret_cast<uint8_t*>(blocks_.bytes.data());
    for (const CachedSequence& from : c_.sequences) at = std::copy(from.blocks.begin(), from.blocks.end(), at);
    args.mask.block_mask = blocks_.view;
  }
  void write_bounds() {
    const CachedShape& s = c_.shape;
    const int64_t heads = c_.vector_heads(), most = *std::max_element(s.keys.begin(), s.keys.end());
    bounds = placement_.in_pages ? Storage(DataType::kInt32, {page_count_, slots_, heads, s.vectors})
                                 : Storage(DataType::kInt32, {c_.batch(), heads, most, s.vectors});
    for (int64_t b = 0; b < c_.batch(); ++b) {
      for (int64_t j = 0; j < c_.keys(b); ++j) {
        const auto [page, slot] = place(b, j);
        for (int64_t h = 0; h < heads; ++h) {
          for (int64_t x = 0; x < s.vectors; ++x) {
            const int64_t at = placement_.in_pages ? bounds.at({page, slot, h, x}) : bounds.at({b, h, j, x});
            bounds.set(at, c_.sequences[static_cast<std::size_t>(b)]
                               .bounds[static_cast<std::size_t>((h * c_.keys(b) + j) * s.vectors + x)]);
          }
        }
      }
    }
    args.mask.bounds = bounds.view;
  }
  void write_tail() {
    const int64_t t = c_.shape.tail, words = (t + 31) / 32;
    tail = Storage(DataType::kInt32, {c_.batch(), t, words});
    std::fill(tail.bytes.begin(), tail.bytes.end(), std::byte{0});
    tail_lens = Storage(DataType::kInt32, {c_.batch()});
    depth_ = Storage(DataType::kInt32, {c_.batch(), t});
    auto* bits = reinterpret_cast<uint32_t*>(tail.bytes.data());
    for (int64_t b = 0; b < c_.batch(); ++b) {
      const CachedSequence& s = c_.sequences[static_cast<std::size_t>(b)];
      tail_lens.set(b, static_cast<double>(s.tail_len));
      for (int64_t r = 0; r < t; ++r) {
        depth_.set(b * t + r, s.depth[static_cast<std::size_t>(r)]);
        for (int64_t u = 0; u < t; ++u)
          bits[(b * t + r) * words + u / 32] |= uint32_t{s.tail[static_cast<std::size_t>(r * t + u)]} << (u % 32);
      }
    }
    args.mask.tail = tail.view;
    if (c_.shape.has_tail_lens) args.mask.tail_lens = tail_lens.view;
    if (c_.shape.has_depth) args.mask.tail_depth = depth_.view;
  }
  void write_positions() {
    const CachedShape& s = c_.shape;
    const int64_t most = *std::max_element(s.keys.begin(), s.keys.end());
    q_pos_ = s.packed ? Storage(DataType::kInt32, {c_.total_rows() + 2})
                      : Storage(DataType::kInt32, {c_.batch(), c_.rows(0)});
    k_pos_ = placement_.in_pages ? Storage(DataType::kInt32, {page_count_, slots_})
                                 : Storage(DataType::kInt32, {c_.batch(), most});
    for (int64_t b = 0; b < c_.batch(); ++b) {
      const CachedSequence& from = c_.sequences[static_cast<std::size_t>(b)];
      for (int64_t i = 0; i < c_.rows(b); ++i)
        q_pos_.set(s.packed ? first_row(b) + i : q_pos_.at({b, i}), from.q_pos[static_cast<std::size_t>(i)]);
      for (int64_t j = 0; j < c_.keys(b); ++j) {
        const auto [page, slot] = place(b, j);
        k_pos_.set(placement_.in_pages ? k_pos_.at({page, slot}) : k_pos_.at({b, j}),
                   from.k_pos[static_cast<std::size_t>(j)]);
      }
    }
    args.mask.q_pos = q_pos_.view;
    args.mask.k_pos = k_pos_.view;
  }

  const CachedCase& c_;
  CachedPlacement placement_;
  int64_t page_count_ = 0, slots_ = 0;
  std::vector<std::vector<int64_t>> pages_;
  Storage k_, v_, q_, out_, lse_, k_scale_, v_scale_, depth_, q_pos_, k_pos_, blocks_, sink_, slopes_;
};

}  // namespace flashmask::test
