// SPDX-License-Identifier: Apache-2.0
#pragma once

// One request on the host: where its keys lie, and which of them a row sees. The one place that says so; everything
// here stays inside the tensors whatever lengths, tables and masks hold.

#include <algorithm>
#include <cstdint>

#include "call/cached_problem.h"

namespace flashmask {

/// int32 element of a tensor, by the indices of its dimensions.
template <typename... Index>
int32_t int32_at(const TensorView& t, Index... index) {
  int64_t offset = 0;
  int d = 0;
  ((offset += static_cast<int64_t>(index) * t.stride[static_cast<std::size_t>(d++)]), ...);
  return static_cast<const int32_t*>(t.data)[offset];
}

/// A key's place in the cache; page -1: a table names a page that is not there.
struct KeyPlace {
  int64_t page, slot;
};

/// Rows that a key is hidden from by its vectors.
struct HiddenIntervals {
  int32_t begin[2] = {kForGood, kForGood}, end[2] = {0, 0};
  bool hides(int64_t row) const { return (row >= begin[0] && row < end[0]) || (row >= begin[1] && row < end[1]); }
};

class Sequence {
 public:
  Sequence(const CachedProblem& p, int64_t b) : p_(p), b_(b) {
    read_rows();
    read_pages();
    keys_ = p.cache.seqlens.defined() ? int32_at(p.cache.seqlens, b) : room_;
    keys_ = std::clamp(keys_, int64_t{0}, room_);
    if (p.mask.tail.defined()) read_tail();
  }

  const RequestRows& rows() const { return rows_; }
  int64_t keys() const { return keys_; }
  /// The sequence's row that row 0 of the call is; below 0 where the call has more rows than the sequence keys.
  int64_t first_row() const { return keys_ - rows_.count; }
  /// The first row and key of the tail; keys() if there is none.
  int64_t tail_begin() const { return keys_ - tail_; }

  KeyPlace place(int64_t j) const {
    if (!p_.has_tables()) return {b_, j};
    const int64_t n = j / p_.page_size;
    const int64_t page = p_.cache.page_table.defined() ? int32_at(p_.cache.page_table, b_, n)
                                                       : int32_at(p_.cache.page_indices, first_entry_ + n);
    return {page >= 0 && page < p_.pages ? page : -1, j % p_.page_size};
  }

  /// The places of `count` keys from `first` on.
  void load_places(int64_t first, int64_t count, KeyPlace* at) const {
    for (int64_t n = 0; n < count;) {
      const KeyPlace begin = place(first + n);
      const int64_t run = p_.has_tables() ? std::min(count - n, p_.page_size - begin.slot) : count;
      for (int64_t i = 0; i < run; ++i) at[n + i] = {begin.page, begin.slot + i};
      n += run;
    }
  }

  /// Vectors of key j, which lies at `at`, for key head hk.
  HiddenIntervals hidden(int64_t j, const KeyPlace& at, int64_t hk) const {
    HiddenIntervals rows;
    const TensorView& t = p_.mask.bounds;
    if (!t.defined()) return rows;
    const int32_t* x;
    if (p_.mask.key_layout == KeyLayout::kPages) {
      if (at.page < 0) return rows;
      x = static_cast<const int32_t*>(t.data) + at.page * t.stride[0] + at.slot * t.stride[1] +
          (t.shape[2] == 1 ? 0 : hk) * t.stride[2];
    } else {
      if (j >= t.shape[2]) return rows;
      x = static_cast<const int32_t*>(t.data) + (t.shape[0] == 1 ? 0 : b_) * t.stride[0] +
          (t.shape[1] == 1 ? 0 : hk) * t.stride[1] + j * t.stride[2];
    }
    const int64_t vectors = t.shape[3], step = t.stride[3];
    rows.begin[0] = x[0];
    rows.end[0] = p_.mask.causal ? (vectors == 2 ? x[step] : kForGood) : vectors == 4 ? x[step] : kForGood;
    if (!p_.mask.causal) {
      rows.begin[1] = vectors == 4 ? x[2 * step] : 0;
      rows.end[1] = x[(vectors - 1) * step];
    }
    return rows;
  }

  /// Position of the sequence's row r, which is one of the call's.
  int64_t row_position(int64_t r) const {
    const TensorView& t = p_.mask.q_pos;
    if (t.defined()) {
      const int64_t i = r - first_row();
      return p_.is_packed() ? int32_at(t, rows_.begin + i) : int32_at(t, b_, i);
    }
    return tail_position(r);
  }
  /// Position of key j, which lies at `at`.
  int64_t key_position(int64_t j, const KeyPlace& at) const {
    const TensorView& t = p_.mask.k_pos;
    if (!t.defined()) return tail_position(j);
    if (p_.mask.key_layout == KeyLayout::kPages) return at.page < 0 ? j : int32_at(t, at.page, at.slot);
    return j < t.shape[1] ? int32_at(t, t.shape[0] == 1 ? 0 : b_, j) : j;
  }
  /// True if positions are others than indices.
  bool has_positions() const { return p_.mask.q_pos.defined() || (p_.mask.tail_depth.defined() && tail_ > 0); }

  /// True if the band and the tail let row r see key j, at these positions.
  bool in_band(int64_t r, int64_t j, int64_t row_position, int64_t key_position) const {
    const int64_t distance = key_position - row_position;
    if (distance < p_.diagonal_lo) return false;
    if (r >= tail_begin() && j >= tail_begin()) return tail_bit(r - tail_begin(), j - tail_begin());
    return distance <= p_.diagonal_hi;
  }
  bool tail_bit(int64_t row, int64_t key) const {
    return static_cast<uint32_t>(int32_at(p_.mask.tail, b_, row, key / 32)) >> (key % 32) & 1u;
  }

  /// True if row r (0 or more) sees key j < keys() for the heads of key head hk.
  bool sees(int64_t r, int64_t j, int64_t hk) const {
    const KeyPlace at = place(j);
    return in_band(r, j, row_position(r), key_position(j, at)) && !hidden(j, at, hk).hides(r);
  }

 private:
  void read_rows() {
    if (!p_.is_packed()) {
      rows_ = {0, p_.rows};
      return;
    }
    const int64_t begin = std::clamp<int64_t>(int32_at(p_.cu_seqlens_q, b_), 0, p_.rows),
                  end = std::clamp<int64_t>(int32_at(p_.cu_seqlens_q, b_ + 1), begin, p_.rows);
    rows_ = {begin, end - begin};
  }
  void read_pages() {
    room_ = p_.capacity;
    if (!p_.cache.page_indptr.defined()) return;
    const int64_t entries = p_.cache.page_indices.shape[0];
    first_entry_ = std::clamp<int64_t>(int32_at(p_.cache.page_indptr, b_), 0, entries);
    const int64_t end = std::clamp<int64_t>(int32_at(p_.cache.page_indptr, b_ + 1), first_entry_, entries);
    room_ = (end - first_entry_) * p_.page_size;
  }
  void read_tail() {
    const int64_t most = std::min(p_.mask.tail.shape[1], keys_);
    const int64_t wanted = p_.mask.tail_lens.defined() ? int32_at(p_.mask.tail_lens, b_) : rows_.count;
    tail_ = std::clamp(wanted, int64_t{0}, most);
  }
  int64_t tail_position(int64_t index) const {
    if (!p_.mask.tail_depth.defined() || index < tail_begin()) return index;
    return tail_begin() + int32_at(p_.mask.tail_depth, b_, index - tail_begin());
  }

  const CachedProblem& p_;
  int64_t b_;
  RequestRows rows_;
  int64_t first_entry_ = 0, room_ = 0, keys_ = 0, tail_ = 0;
};

}  // namespace flashmask
