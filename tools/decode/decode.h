// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "flashmask/kv_cache.h"
#include "run/check.h"

namespace flashmask::decode {

struct DecodeOptions {
  int64_t prompt = 2048;  ///< tokens
  int64_t drafts = 24;    ///< nodes of the tree
  int64_t page_size = 16;
  int64_t heads = 8, kv_heads = 2, head_dim = 64;
  DataType dtype = DataType::kBFloat16;
  std::string backend = "auto";
  int threads = 0;
  uint64_t seed = 0;
  std::string report{};  ///< empty: none
};

/// Everything that `flashmask decode` found out.
struct DecodeFigures {
  DecodeOptions options;
  std::vector<int32_t> parents{}, depth{};  ///< a draft's; a root has parent -1
  std::vector<int32_t> table{};             ///< the sequence's pages in their order
  int64_t pages = 0;                        ///< how many the cache has
  double append_prompt = 0, prefill = 0, append_drafts = 0, verify = 0, one_row = 0;  ///< seconds
  int64_t bytes_read = 0;  ///< by the verification, keys and values
  int64_t mask_bytes = 0, dense_bytes = 0, plan_bytes = 0;
  std::size_t workspace_bytes = 0;
  std::string backend{}, kernel{};
  std::vector<run::Accuracy> accuracy{};

  int64_t keys() const { return options.prompt + options.drafts; }
  /// True if draft u is t or on the way from the root to it.
  bool is_ancestor(int64_t u, int64_t t) const;
  bool passed() const;
};

/// Appends a prompt to pages in permuted order and attends to it, appends a tree of drafts, and attends from all of its
/// nodes at once: each sees the prompt, its ancestors and itself, at the position that its depth says. Checks sampled
/// rows of the prompt and all of the drafts against the oracle in float64, which goes by the nodes' parents.
DecodeFigures decode(const DecodeOptions& options);

/// Several lines, as the command prints them.
std::string to_text(const DecodeFigures& figures);

/// One HTML page that needs nothing else.
std::string report_html(const DecodeFigures& figures);

}  // namespace flashmask::decode
