// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "flashmask/export.h"
#include "flashmask/mask.h"

namespace flashmask {

/// The lengths of documents packed one after the other into a sequence. Length 0 and 1 are legal.
class FLASHMASK_API Documents {
 public:
  static Documents from_lengths(std::span<const int64_t> lengths);
  /// [0, end of document 0, end of document 1, ...], ascending.
  static Documents from_cu_seqlens(std::span<const int64_t> cu_seqlens);
  /// One id per token; a run of equal ids is a document. An id that recurs later is an error.
  static Documents from_ids(std::span<const int64_t> ids);
  /// One position per token; a new document begins wherever pos[i] != pos[i - 1] + 1.
  static Documents from_position_ids(std::span<const int64_t> positions);

  int64_t count() const { return static_cast<int64_t>(begin_.size()) - 1; }
  int64_t total() const { return begin_.back(); }
  int64_t begin(int64_t document) const { return begin_[static_cast<std::size_t>(document)]; }
  int64_t end(int64_t document) const { return begin_[static_cast<std::size_t>(document) + 1]; }
  int64_t length(int64_t document) const { return end(document) - begin(document); }
  /// [0, end of document 0, ...]; valid as long as this object lives.
  std::span<const int64_t> cu_seqlens() const { return begin_; }

 private:
  std::vector<int64_t> begin_{0};
};

/// One question and its answers, in tokens, packed as question, answer 1, answer 2, ...
struct QuestionGroup {
  int64_t question = 0;
  std::vector<int64_t> answers;
};

/// Positions [begin, end).
struct Span {
  int64_t begin = 0, end = 0;
};

/// The builders. i is a query row, j a key; all masks are for one batch entry and one head, to be
/// broadcast. Sources: FlashMask (arXiv:2410.01359), figure 1 (a) unless another is named.
namespace masks {

/// Every row sees every key.
FLASHMASK_API Mask full(int64_t seqlen_q, int64_t seqlen_k);

/// j <= i + q_offset; q_offset defaults to seqlen_k - seqlen_q.
FLASHMASK_API Mask causal(int64_t seqlen_q, int64_t seqlen_k, std::optional<int64_t> q_offset = std::nullopt);

/// i + q_offset - left <= j <= i + q_offset + right; -1 is unbounded. The paper's window of w keys is
/// left = w - 1, right = 0.
FLASHMASK_API Mask sliding_window(int64_t seqlen_q, int64_t seqlen_k, int64_t left, int64_t right = 0,
                                  std::optional<int64_t> q_offset = std::nullopt);

/// Same document and j <= i: packed pretraining and SFT.
FLASHMASK_API Mask causal_document(const Documents& documents);

/// Same document, both directions.
FLASHMASK_API Mask document(const Documents& documents);

/// DPO and reward models: j <= i, same group, and j in the question or in i's own answer.
FLASHMASK_API Mask shared_question(std::span<const QuestionGroup> groups);

/// i < global_tokens, or j < global_tokens, or |i - j| <= window (BigBird without its random part,
/// arXiv:2007.14062).
FLASHMASK_API Mask global_sliding_window(int64_t seqlen, int64_t global_tokens, int64_t window);

/// In-context learning: j <= i, and j in i's own block or i in the last block (arXiv:2405.00200).
FLASHMASK_API Mask causal_blockwise(const Documents& blocks);

/// j <= i or j < prefix (T5's prefix LM, arXiv:1910.10683).
FLASHMASK_API Mask prefix_lm_causal(int64_t seqlen, int64_t prefix);

/// Same document, and j <= i or j among the first prefix[document] tokens of the document.
FLASHMASK_API Mask prefix_lm_document(const Documents& documents, std::span<const int64_t> prefix);

/// j <= i, and a key j of a dropped span is hidden from the rows j up to the end of its span, itself
/// included (the benchmark's form of Sparse Causal Flash Attention's QK-sparse mask, arXiv:2306.01160).
/// Spans must be ascending and disjoint.
FLASHMASK_API Mask qk_sparse(int64_t seqlen, std::span<const Span> dropped);

/// Row i sees key j iff they fell into the same bucket and, if `causal`, j <= i + seqlen_k - seqlen_q (Reformer's
/// hashing, arXiv:2001.04451, in Sparse Causal Flash Attention's form). Fits two intervals if the rows of every bucket
/// are contiguous, as after the usual sort by bucket; otherwise kUnrepresentable names the first column that does not
/// fit.
FLASHMASK_API Mask hash_sparse(std::span<const int64_t> query_buckets, std::span<const int64_t> key_buckets,
                               bool causal);

/// j <= i, and key j is gone from row evicted_at[j] on (KV-cache eviction, NACL, ACL 2024).
FLASHMASK_API Mask eviction(std::span<const int64_t> evicted_at);

/// A seeded `eviction`: from row seqlen / 2 on, each row evicts one more key, drawn among the remaining keys before it.
FLASHMASK_API Mask random_eviction(int64_t seqlen, uint64_t seed);

/// A packed prefix tree or forest: row i sees key j iff j <= i and j's node is i's node or an ancestor of
/// it. Nodes come in depth-first order: parents[n] < n is the parent, -1 a root; node n holds lengths[n]
/// consecutive tokens (empty: one token each). Several trees are several roots. An order that is not
/// depth-first is an error naming the node.
///
/// window: a row sees only keys less than `window` positions before it, its own key included. A token's position is the
/// number of tokens before it on the path from its tree's root. -1: all keys. With a window the mask has these
/// positions, and every path from a root sees the keys that it would see as a separate sequence.
FLASHMASK_API Mask prefix_tree(std::span<const int64_t> parents, std::span<const int64_t> lengths = {},
                               int64_t window = -1);

/// A prefix tree or forest from depth-first intervals: node n's own tokens begin at tin[n] and its subtree ends before
/// tout[n]. Intervals must nest; an error names the first node whose interval does not.
FLASHMASK_API Mask prefix_tree_from_intervals(std::span<const int64_t> tin, std::span<const int64_t> tout,
                                              int64_t window = -1);

/// One mask per batch entry: keys at key_lengths[b] and beyond are hidden, and, if query_lengths is given,
/// rows at query_lengths[b] and beyond see nothing.
FLASHMASK_API Mask padding(int64_t seqlen_q, int64_t seqlen_k, std::span<const int64_t> key_lengths,
                           std::span<const int64_t> query_lengths = {});

}  // namespace masks
}  // namespace flashmask
