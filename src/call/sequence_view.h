// SPDX-License-Identifier: Apache-2.0
#pragma once

// One request: where its keys lie, and which of them a row sees. The one place that says so, for hosts and devices;
// everything here stays inside the tensors whatever lengths, tables and masks hold.

#include <cstdint>

#include "call/quotient.h"
#include "mask/rules.h"

namespace flashmask {

/// Elements by the indices of their dimensions; null data: the tensor is absent.
template <typename T, int kRank>
struct Elements {
  const T* data = nullptr;
  int64_t stride[kRank] = {};

  FLASHMASK_RULE bool defined() const { return data != nullptr; }
  template <typename... Index>
  FLASHMASK_RULE T at(Index... index) const {
    static_assert(sizeof...(Index) == kRank);
    int64_t offset = 0;
    int d = 0;
    ((offset += static_cast<int64_t>(index) * stride[d++]), ...);
    return data[offset];
  }
};

template <int kRank>
using Int32Elements = Elements<int32_t, kRank>;

/// An edge of the band, negated for the lower one, that no distance is beyond, and yet such that sums with a position
/// do not overflow.
inline constexpr int64_t kOpenDiagonal = int64_t{1} << 40;

/// True if a band asks for the depths of drafts. Without a window's lower edge, and with the upper one on the diagonal
/// or open, their indices answer alike: drafts come after all other keys, and the tail's bits say the rest.
FLASHMASK_RULE bool band_reads_depth(int64_t diagonal_lo, int64_t diagonal_hi) {
  return diagonal_lo > -kOpenDiagonal || (diagonal_hi != 0 && diagonal_hi < kOpenDiagonal);
}

/// The tensors and numbers of a call over a cache that say where keys lie and what rows see; see CachedProblem.
struct CachedView {
  int64_t batch = 0, rows = 0, capacity = 0, page_size = 0, pages = 0;
  Int32Elements<1> cu_seqlens_q{}, page_indptr{}, page_indices{}, seqlens{}, tail_lens{};
  Int32Elements<2> page_table{}, tail_depth{}, q_pos{}, k_pos{};
  Int32Elements<3> tail{};
  /// By page, slot, head and vector, or by request, head, column and vector; a stride of 0 broadcasts.
  Int32Elements<4> bounds{};
  /// By request, head, block of rows and block of keys, likewise.
  Elements<uint8_t, 4> block_mask{};
  int64_t index_entries = 0;     ///< entries of page_indices
  int64_t bound_columns = 0;     ///< columns of bounds by request
  int64_t position_columns = 0;  ///< columns of k_pos by request
  int64_t tail_rows = 0;         ///< T
  int64_t mask_row_blocks = 0;   ///< row blocks of block_mask; 1: it stands for all
  int64_t mask_key_blocks = 0;   ///< key blocks of block_mask
  int64_t diagonal_lo = 0, diagonal_hi = 0;
  int32_t vectors = 0;
  bool is_packed = false, causal = true, keys_in_pages = false;

  FLASHMASK_RULE bool has_tables() const { return page_table.defined() || page_indptr.defined(); }
};

/// The rows of a call that are a request's: [begin, begin + count) of a packed q, or of batch entry b.
struct RequestRows {
  int64_t begin = 0, count = 0;
};

/// A key's place in the cache; page -1: a table names a page that is not there.
struct KeyPlace {
  int64_t page, slot;
};

/// Rows that a key is hidden from by its vectors.
struct HiddenIntervals {
  int32_t begin[2] = {INT32_MAX, INT32_MAX}, end[2] = {0, 0};
  FLASHMASK_RULE bool hides(int64_t row) const {
    return (row >= begin[0] && row < end[0]) || (row >= begin[1] && row < end[1]);
  }
};

/// The numbers of a request, as its call's tensors have them.
struct SequenceSizes {
  RequestRows rows{};
  int64_t first_entry = 0, keys = 0, tail = 0;
};

class SequenceView {
 public:
  static constexpr int64_t kBlockSize = 128;  ///< kBlockMaskSize

  FLASHMASK_RULE SequenceView(const CachedView& call, int64_t b, const SequenceSizes& sizes)
      : call_(call), b_(b), sizes_(sizes) {}
  FLASHMASK_RULE SequenceView(const CachedView& call, int64_t b) : call_(call), b_(b) {
    read_rows();
    const int64_t room = read_pages();
    sizes_.keys = clamp(call.seqlens.defined() ? call.seqlens.at(b) : room, 0, room);
    if (call.tail.defined()) read_tail();
  }

  FLASHMASK_RULE const SequenceSizes& sizes() const { return sizes_; }
  FLASHMASK_RULE const RequestRows& rows() const { return sizes_.rows; }
  FLASHMASK_RULE int64_t keys() const { return sizes_.keys; }
  /// The sequence's row that row 0 of the call is; below 0 where the call has more rows than the sequence keys.
  FLASHMASK_RULE int64_t first_row() const { return sizes_.keys - sizes_.rows.count; }
  /// The first row and key of the tail; keys() if there is none.
  FLASHMASK_RULE int64_t tail_begin() const { return sizes_.keys - sizes_.tail; }

  FLASHMASK_RULE KeyPlace place(int64_t j) const {
    if (!call_.has_tables()) return {b_, j};
    const int64_t n = quotient(j, call_.page_size);
    return place(j, n, table_entry(n));
  }
  /// Likewise of a key of the n-th page_size keys, for which a table has `entry`.
  FLASHMASK_RULE KeyPlace place(int64_t j, int64_t n, int32_t entry) const {
    if (!call_.has_tables()) return {b_, j};
    return {entry >= 0 && entry < call_.pages ? entry : -1, j - n * call_.page_size};
  }
  /// The table's entry of the n-th page_size keys.
  FLASHMASK_RULE int32_t table_entry(int64_t n) const {
    return call_.page_table.defined() ? call_.page_table.at(b_, n) : call_.page_indices.at(sizes_.first_entry + n);
  }

  /// Vectors of key j, which lies at `at`, for key head hk.
  FLASHMASK_RULE HiddenIntervals hidden(int64_t j, const KeyPlace& at, int64_t hk) const {
    HiddenIntervals rows;
    const Int32Elements<4>& t = call_.bounds;
    if (!t.defined()) return rows;
    const int32_t* x;
    if (call_.keys_in_pages) {
      if (at.page < 0) return rows;
      x = t.data + at.page * t.stride[0] + at.slot * t.stride[1] + hk * t.stride[2];
    } else {
      if (j >= call_.bound_columns) return rows;
      x = t.data + b_ * t.stride[0] + hk * t.stride[1] + j * t.stride[2];
    }
    const int64_t step = t.stride[3];
    rows.begin[0] = x[0];
    rows.end[0] = call_.vectors == (call_.causal ? 2 : 4) ? x[step] : INT32_MAX;
    if (!call_.causal) {
      rows.begin[1] = call_.vectors == 4 ? x[2 * step] : 0;
      rows.end[1] = x[(call_.vectors - 1) * step];
    }
    return rows;
  }

  /// Position of the sequence's row r, which is one of the call's.
  FLASHMASK_RULE int64_t row_position(int64_t r) const {
    if (!call_.q_pos.defined()) return tail_position(r);
    const int64_t i = r - first_row();
    return call_.is_packed ? call_.q_pos.at(0, sizes_.rows.begin + i) : call_.q_pos.at(b_, i);
  }
  /// Position of key j, which lies at `at`.
  FLASHMASK_RULE int64_t key_position(int64_t j, const KeyPlace& at) const {
    if (!call_.k_pos.defined()) return tail_position(j);
    if (call_.keys_in_pages) return at.page < 0 ? j : call_.k_pos.at(at.page, at.slot);
    return j < call_.position_columns ? call_.k_pos.at(b_, j) : j;
  }
  /// True if positions are others than indices.
  FLASHMASK_RULE bool has_positions() const { return call_.q_pos.defined() || has_depth(); }
  /// True if the band has to be asked by positions.
  FLASHMASK_RULE bool has_band_positions() const {
    return call_.q_pos.defined() || (has_depth() && band_reads_depth(call_.diagonal_lo, call_.diagonal_hi));
  }

  /// True if the band and the tail let row r see key j, at these positions.
  FLASHMASK_RULE bool in_band(int64_t r, int64_t j, int64_t row_position, int64_t key_position) const {
    return in_band(r, j, row_position, key_position,
                   [this](int64_t row, int64_t key) { return this->tail_bit(row, key); });
  }
  /// With the tail's bits from elsewhere, by row and key of the tail.
  template <typename TailBit>
  FLASHMASK_RULE bool in_band(int64_t r, int64_t j, int64_t row_position, int64_t key_position,
                              const TailBit& bit) const {
    const int64_t distance = key_position - row_position;
    if (distance < call_.diagonal_lo) return false;
    if (r >= tail_begin() && j >= tail_begin()) return bit(r - tail_begin(), j - tail_begin());
    return distance <= call_.diagonal_hi;
  }
  FLASHMASK_RULE bool tail_bit(int64_t row, int64_t key) const {
    return static_cast<uint32_t>(call_.tail.at(b_, row, key / 32)) >> (key % 32) & 1u;
  }

  /// True if the block mask lets row r (0 or more) see key j under key head hk.
  FLASHMASK_RULE bool in_blocks(int64_t r, int64_t j, int64_t hk) const {
    const Elements<uint8_t, 4>& t = call_.block_mask;
    if (!t.defined()) return true;
    const int64_t row_block = call_.mask_row_blocks == 1 ? 0 : r / kBlockSize, key_block = j / kBlockSize;
    if (row_block >= call_.mask_row_blocks || key_block >= call_.mask_key_blocks) return true;
    return t.at(b_, hk, row_block, key_block) != 0;
  }

  /// True if row r (0 or more) sees key j < keys() for the heads of key head hk.
  FLASHMASK_RULE bool sees(int64_t r, int64_t j, int64_t hk) const {
    const KeyPlace at = place(j);
    return in_band(r, j, row_position(r), key_position(j, at)) && !hidden(j, at, hk).hides(r) && in_blocks(r, j, hk);
  }

  /// The keys [begin, end) that the band lets some row of [first_row, first_row + count) see; keys between may be
  /// hidden. With positions all keys: each has to be looked at.
  struct Reach {
    int64_t begin, end;
  };
  FLASHMASK_RULE Reach reach(int64_t first_row, int64_t count) const {
    const int64_t least = first_row > 0 ? first_row : 0, last = first_row + count - 1;
    if (last < least) return {0, 0};
    if (has_band_positions()) return {0, keys()};
    const int64_t end = last >= tail_begin() ? keys() : clamp(last + call_.diagonal_hi + 1, 0, keys());
    return {clamp(least + call_.diagonal_lo, 0, end), end};
  }

 private:
  FLASHMASK_RULE static int64_t clamp(int64_t x, int64_t least, int64_t most) {
    const int64_t at_most = x < most ? x : most;
    return at_most > least ? at_most : least;
  }
  FLASHMASK_RULE bool has_depth() const { return call_.tail_depth.defined() && sizes_.tail > 0; }
  FLASHMASK_RULE void read_rows() {
    sizes_.rows = {0, call_.rows};
    if (!call_.is_packed) return;
    sizes_.rows.begin = clamp(call_.cu_seqlens_q.at(b_), 0, call_.rows);
    sizes_.rows.count = clamp(call_.cu_seqlens_q.at(b_ + 1), sizes_.rows.begin, call_.rows) - sizes_.rows.begin;
  }
  /// Reads where the request's table begins; returns the keys that it has room for.
  FLASHMASK_RULE int64_t read_pages() {
    if (!call_.page_indptr.defined()) return call_.capacity;
    sizes_.first_entry = clamp(call_.page_indptr.at(b_), 0, call_.index_entries);
    const int64_t end = clamp(call_.page_indptr.at(b_ + 1), sizes_.first_entry, call_.index_entries);
    return clamp((end - sizes_.first_entry) * call_.page_size, 0, call_.capacity);
  }
  FLASHMASK_RULE void read_tail() {
    const int64_t most = call_.tail_rows < sizes_.keys ? call_.tail_rows : sizes_.keys;
    sizes_.tail = clamp(call_.tail_lens.defined() ? call_.tail_lens.at(b_) : sizes_.rows.count, 0, most);
  }
  FLASHMASK_RULE int64_t tail_position(int64_t index) const {
    if (!call_.tail_depth.defined() || index < tail_begin()) return index;
    return tail_begin() + call_.tail_depth.at(b_, index - tail_begin());
  }

  const CachedView& call_;
  int64_t b_;
  SequenceSizes sizes_{};
};

}  // namespace flashmask
