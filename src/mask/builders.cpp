// SPDX-License-Identifier: Apache-2.0
#include "flashmask/builders.h"

#include <algorithm>
#include <array>
#include <limits>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "common/arithmetic.h"
#include "common/message.h"
#include "common/random.h"
#include "mask/building.h"
#include "mask/hidden_columns.h"

namespace flashmask {
using namespace building;

namespace {

void check_length(const char* argument, int64_t index, int64_t length) {
  if (length < 0) throw_invalid(argument, "[", index, "] is ", length, "; a length must be at least 0");
}

void check_total(int64_t total) {
  if (total > kMaxSeqlen) throw_invalid("the lengths add up to more than ", kMaxSeqlen, " tokens");
}

}  // namespace

Documents Documents::from_lengths(std::span<const int64_t> lengths) {
  Documents documents;
  documents.begin_.reserve(lengths.size() + 1);
  for (std::size_t n = 0; n < lengths.size(); ++n) {
    check_length("lengths", static_cast<int64_t>(n), lengths[n]);
    check_total(lengths[n]);
    documents.begin_.push_back(documents.begin_.back() + lengths[n]);
    check_total(documents.total());
  }
  return documents;
}

Documents Documents::from_cu_seqlens(std::span<const int64_t> cu_seqlens) {
  if (cu_seqlens.empty() || cu_seqlens[0] != 0)
    throw_invalid("cu_seqlens must begin with 0, then give the end of each document");
  for (std::size_t n = 1; n < cu_seqlens.size(); ++n) {
    if (cu_seqlens[n] < cu_seqlens[n - 1])
      throw_invalid("cu_seqlens[", n, "] is ", cu_seqlens[n], ", less than the entry before it, ", cu_seqlens[n - 1]);
  }
  check_total(cu_seqlens.back());
  Documents documents;
  documents.begin_.assign(cu_seqlens.begin(), cu_seqlens.end());
  return documents;
}

Documents Documents::from_ids(std::span<const int64_t> ids) {
  check_total(static_cast<int64_t>(ids.size()));
  Documents documents;
  std::unordered_set<int64_t> seen;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (i > 0 && ids[i] == ids[i - 1]) continue;
    if (!seen.insert(ids[i]).second)
      throw_invalid("document id ", ids[i], " comes back at position ", i,
                    "; the tokens of a document must be contiguous");
    if (i > 0) documents.begin_.push_back(static_cast<int64_t>(i));
  }
  if (!ids.empty()) documents.begin_.push_back(static_cast<int64_t>(ids.size()));
  return documents;
}

Documents Documents::from_position_ids(std::span<const int64_t> positions) {
  check_total(static_cast<int64_t>(positions.size()));
  Documents documents;
  for (std::size_t i = 1; i < positions.size(); ++i) {
    // Written without the sum: it cannot overflow.
    const bool next = positions[i - 1] != std::numeric_limits<int64_t>::max() && positions[i] == positions[i - 1] + 1;
    if (!next) documents.begin_.push_back(static_cast<int64_t>(i));
  }
  if (!positions.empty()) documents.begin_.push_back(static_cast<int64_t>(positions.size()));
  return documents;
}

namespace masks {

Mask full(int64_t seqlen_q, int64_t seqlen_k) { return Mask({.seqlen_q = seqlen_q, .seqlen_k = seqlen_k}); }

Mask causal(int64_t seqlen_q, int64_t seqlen_k, std::optional<int64_t> q_offset) {
  return Mask({.seqlen_q = seqlen_q, .seqlen_k = seqlen_k, .band = Band::causal(), .q_offset = q_offset});
}

Mask sliding_window(int64_t seqlen_q, int64_t seqlen_k, int64_t left, int64_t right, std::optional<int64_t> q_offset) {
  return Mask({.seqlen_q = seqlen_q, .seqlen_k = seqlen_k, .band = Band::window(left, right), .q_offset = q_offset});
}

Mask causal_document(const Documents& documents) { return build_mask("causal_document", {of(documents)}); }

Mask document(const Documents& documents) { return build_mask("document", {of(documents)}); }

Mask shared_question(std::span<const QuestionGroup> groups) {
  std::vector<int64_t> lengths;
  std::vector<uint8_t> is_question;
  int64_t total = 0;
  const auto add = [&](int64_t length, bool question) {
    check_total(length);
    check_total(total += length);
    lengths.push_back(length);
    is_question.push_back(question);
  };
  for (std::size_t g = 0; g < groups.size(); ++g) {
    check_length("question", static_cast<int64_t>(g), groups[g].question);
    add(groups[g].question, true);
    for (const int64_t answer : groups[g].answers) {
      check_length("answers of question", static_cast<int64_t>(g), answer);
      add(answer, false);
    }
  }
  const auto segments = static_cast<int64_t>(lengths.size());
  return build_mask(
      "shared_question",
      {of("seqlens", lengths),
       {.name = "is_question", .vector = TensorView::contiguous(is_question.data(), DataType::kBool, {segments})}});
}

Mask global_sliding_window(int64_t seqlen, int64_t global_tokens, int64_t window) {
  return build_mask("global_sliding_window",
                    {of("seqlen", seqlen), of("global_tokens", global_tokens), of("window", window)});
}

Mask causal_blockwise(const Documents& blocks) { return build_mask("causal_blockwise", {of(blocks)}); }

Mask prefix_lm_causal(int64_t seqlen, int64_t prefix) {
  return build_mask("prefix_lm_causal", {of("seqlen", seqlen), of("prefix", prefix)});
}

Mask prefix_lm_document(const Documents& documents, std::span<const int64_t> prefix) {
  return build_mask("prefix_lm_document", {of(documents), of("prefix", prefix)});
}

Mask qk_sparse(int64_t seqlen, std::span<const Span> dropped) {
  static_assert(sizeof(Span) == 2 * sizeof(int64_t));
  const auto spans = static_cast<int64_t>(dropped.size());
  return build_mask("qk_sparse", {of("seqlen", seqlen),
                                  {.name = "dropped",
                                   .vector = TensorView::contiguous(dropped.data(), DataType::kInt64, {spans, 2})}});
}

Mask hash_sparse(std::span<const int64_t> query_buckets, std::span<const int64_t> key_buckets, bool causal) {
  const Mask mask = build_mask("hash_sparse", {of("query_buckets", query_buckets), of("key_buckets", key_buckets),
                                               of("causal", static_cast<int64_t>(causal))});
  // In as few vectors as it takes.
  const std::array candidates{mask.band()};
  return Mask(fit_two_intervals(MaskColumns(mask), candidates, mask.q_offset(), "the hash-sparse mask").parts());
}

Mask eviction(std::span<const int64_t> evicted_at) { return build_mask("eviction", {of("evicted_at", evicted_at)}); }

Mask random_eviction(int64_t seqlen, uint64_t seed) {
  check_not_negative("seqlen", seqlen);
  check_total(seqlen);
  Random random(seed);
  std::vector<int64_t> evicted_at(static_cast<std::size_t>(seqlen), seqlen);
  std::vector<int64_t> present;  // keys before the current row that are still there
  for (int64_t i = 0; i < seqlen; ++i) {
    if (i >= seqlen / 2 && !present.empty()) {
      const auto victim = static_cast<std::size_t>(random.integer(0, static_cast<int64_t>(present.size()) - 1));
      evicted_at[static_cast<std::size_t>(present[victim])] = i;
      present[victim] = present.back();
      present.pop_back();
    }
    present.push_back(i);
  }
  return eviction(evicted_at);
}

Mask prefix_tree(std::span<const int64_t> parents, std::span<const int64_t> lengths, int64_t window) {
  std::vector<Parameter> parameters{of("parents", parents), of("window", window)};
  if (!lengths.empty()) parameters.push_back(of("lengths", lengths));
  return build_mask("prefix_tree", parameters);
}

Mask prefix_tree_from_intervals(std::span<const int64_t> tin, std::span<const int64_t> tout, int64_t window) {
  return build_mask("prefix_tree_from_intervals", {of("tin", tin), of("tout", tout), of("window", window)});
}

Mask padding(int64_t seqlen_q, int64_t seqlen_k, std::span<const int64_t> key_lengths,
             std::span<const int64_t> query_lengths) {
  if (key_lengths.empty()) throw_invalid("key_lengths is empty; it needs one entry for each batch entry");
  if (!query_lengths.empty() && query_lengths.size() != key_lengths.size()) {
    throw_invalid("query_lengths has ", query_lengths.size(), " entries and key_lengths ", key_lengths.size(),
                  "; they must be equal");
  }
  std::vector<Parameter> parameters{of("seqlen_q", seqlen_q), of("seqlen_k", seqlen_k), of("key_lengths", key_lengths)};
  if (!query_lengths.empty()) parameters.push_back(of("query_lengths", query_lengths));
  return build_mask("padding", parameters);
}

}  // namespace masks
}  // namespace flashmask
