// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "verify/cached_case.h"

namespace flashmask::verify {

/// A request of a cached case as numbers, wherever it lies. Keys of pages that are not there are zeros.
struct DrawnRequest {
  int64_t keys = 0, rows = 0;
  int64_t tail = 0;                     ///< rows and keys that the tail's bits are about
  std::vector<double> q;                ///< [rows, heads_q, head_dim]
  std::vector<double> k, v;             ///< [keys, heads_kv, ..], as stored
  std::vector<float> k_scale, v_scale;  ///< [keys, heads_kv]
  std::vector<int32_t> bounds;          ///< [vector heads, keys, vectors]
  std::vector<int32_t> q_pos, k_pos;
  int32_t tail_len = 0;          ///< as the call has it
  std::vector<int32_t> depth;    ///< [T]
  std::vector<uint8_t> bits;     ///< [T, T]
  std::vector<uint8_t> missing;  ///< [keys]: the key's page is not there
  std::vector<float> slopes;     ///< [heads_q]
  int64_t row_blocks = 0, key_blocks = 0;
  std::vector<uint8_t> block_mask;  ///< [1 or heads_kv, row_blocks, key_blocks]; empty: there is none

  /// The sequence's row that row 0 is; below 0 where there are more rows than keys.
  int64_t first_row() const { return keys - rows; }
  int64_t tail_begin() const { return keys - tail; }
};

/// A cached case as numbers, and the rule of what a row sees, read from kv_cache.h and not from the library.
struct CachedDraw {
  explicit CachedDraw(const CachedCase& c);

  /// Request b without its neighbours.
  CachedDraw alone(std::size_t b) const;
  /// Request b without its neighbours and without its rows but the last.
  CachedDraw last_row(std::size_t b) const;
  /// True if row r of the sequence sees key j under key head hk.
  bool sees(const DrawnRequest& request, int64_t r, int64_t j, int64_t hk) const;
  /// Distance of a row's position from a key's.
  int64_t distance(const DrawnRequest& request, int64_t r, int64_t j) const;

  CachedCase c;
  int64_t columns;  ///< how many vectors and positions have by sequences
  std::vector<DrawnRequest> requests;
  std::vector<double> sink;  ///< [heads_q], or empty
};

/// Results of a request.
struct RequestResults {
  HeadArray out;                 ///< [1, heads_q, rows, head_dim_v]
  HeadArray lse;                 ///< [1, heads_q, rows, 1]
  std::vector<uint8_t> visible;  ///< [heads_kv, rows, keys]
  std::vector<double> sums;      ///< [heads_q]: of the magnitudes that an element of out is the sum of, the largest
  std::vector<double> scores;    ///< [heads_q]: the largest magnitude of a row's largest score
};

/// The oracle: sums over every key, in float64.
RequestResults run_cached_oracle(const CachedDraw& draw, const DrawnRequest& request);

/// out of the plain implementation (numerics/plain.h), in q's dtype. `visible` is the oracle's.
HeadArray run_cached_plain(const CachedDraw& draw, const DrawnRequest& request, const std::vector<uint8_t>& visible);

}  // namespace flashmask::verify
