// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "flashmask/kv_cache.h"
#include "verify/case.h"

namespace flashmask::verify {

/// How a request's keys are found.
enum class CacheTables { kContiguous, kTable, kLists };

/// Shape of a float8 cache's scales.
enum class ScaleShape { kNone, kTensor, kHead, kPage, kToken, kTokenHead };

/// Positions that a mask over a cache is given.
enum class CachedPositions { kNone, kRows, kRowsAndKeys };

/// Block mask that a mask over a cache is given: of blocks of keys, or of rows and keys.
enum class CachedBlocks { kNone, kKeys, kRowsAndKeys };

/// One call over a KV cache to check. Everything random in it follows from `seed`.
struct CachedCase {
  CacheTables tables = CacheTables::kTable;
  uint64_t seed = 0;
  int64_t page_size = 16;         ///< contiguous: not read
  std::vector<int64_t> keys{64};  ///< n of each request
  std::vector<int64_t> rows{1};   ///< m of each
  bool packed = true;             ///< by cu_seqlens_q; otherwise all m are alike
  int64_t shared = 0;             ///< keys that all requests have in common, in the pages that hold no others
  bool bad = false;               ///< tables name pages that are not there, and lengths are out of range
  int64_t heads_q = 1, heads_kv = 1, head_dim = 64, head_dim_v = 64;
  DataType dtype = DataType::kFloat32;
  bool float8 = false;            ///< the cache; otherwise it has q's dtype
  Layout layout = Layout::kBshd;  ///< kBshd is NHD, kBhsd HND
  bool causal = true;
  Window window{};
  int64_t vectors = 0;
  bool vectors_by_head = false, vectors_by_request = true;
  bool short_columns = false;  ///< vectors and positions end before the keys do
  KeyLayout key_layout = KeyLayout::kPages;
  CachedPositions positions = CachedPositions::kNone;
  int64_t tail = 0;
  bool tail_lens = false, tail_depth = false;
  CachedBlocks blocks = CachedBlocks::kNone;
  bool blocks_by_head = false;
  bool sink = false;
  CaseFeatures features{};  ///< only those of score_features()
  ScaleShape k_scale = ScaleShape::kNone, v_scale = ScaleShape::kNone;
  std::optional<double> given_scale{};  ///< as in Case
  int64_t split_size = kDefaultSplitSize;
  bool batch_invariant = false;  ///< asked for; CPUs always are

  bool operator==(const CachedCase&) const = default;

  int64_t batch() const { return static_cast<int64_t>(keys.size()); }
  int64_t group_size() const { return heads_q / heads_kv; }
  int64_t vector_heads() const { return vectors_by_head ? heads_kv : 1; }
  DataType cache_dtype() const { return float8 ? DataType::kFloat8E4M3 : dtype; }
  bool has_tables() const { return tables != CacheTables::kContiguous; }
  bool in_pages() const { return key_layout == KeyLayout::kPages; }
  double scale() const;
  /// Keys in pages that requests have in common with the first.
  int64_t shared_keys() const;
  /// Columns that vectors and positions have, by sequences.
  int64_t columns() const;
  /// Multiply-adds of the two products over all rows and keys.
  int64_t cost() const;
};

/// True if a line is of this kind: it says "cache=..".
bool is_cached(std::string_view line);

/// The case on one line, complete: "cache=table page_size=16 seed=1 keys=64,3 rows=1,1 ...".
std::string describe(const CachedCase& c);

/// Reads a line that `describe` wrote; what the line leaves out has its default. Throws Error naming a word that it
/// does not understand, or values that do not go together.
CachedCase parse_cached_case(std::string_view line);

}  // namespace flashmask::verify
