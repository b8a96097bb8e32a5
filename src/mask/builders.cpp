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

std::vector<int32_t> rows(int64_t count) { return std::vector<int32_t>(static_cast<std::size_t>(count)); }

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

Mask causal_document(const Documents& documents) {
  std::vector<int32_t> lts;
  lts.reserve(static_cast<std::size_t>(documents.total()));
  for (int64_t n = 0; n < documents.count(); ++n)
    lts.insert(lts.end(), static_cast<std::size_t>(documents.length(n)), row(documents.end(n)));
  return causal_until(std::move(lts));
}

Mask document(const Documents& documents) {
  std::vector<int32_t> lts, ute;
  for (int64_t n = 0; n < documents.count(); ++n) {
    lts.insert(lts.end(), static_cast<std::size_t>(documents.length(n)), row(documents.end(n)));
    ute.insert(ute.end(), static_cast<std::size_t>(documents.length(n)), row(documents.begin(n)));
  }
  return Mask(
      {.seqlen_q = documents.total(), .seqlen_k = documents.total(), .lts = std::move(lts), .ute = std::move(ute)});
}

Mask shared_question(std::span<const QuestionGroup> groups) {
  // The question's keys are seen to the end of the group, an answer's to the end of that answer.
  std::vector<int32_t> lts;
  int64_t begin = 0;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    check_length("question", static_cast<int64_t>(g), groups[g].question);
    check_total(groups[g].question);
    int64_t end = begin + groups[g].question;
    check_total(end);
    for (const int64_t answer : groups[g].answers) {
      check_length("answers of question", static_cast<int64_t>(g), answer);
      check_total(answer);
      end += answer;
      check_total(end);
    }
    lts.insert(lts.end(), static_cast<std::size_t>(groups[g].question), row(end));
    begin += groups[g].question;
    for (const int64_t answer : groups[g].answers) {
      begin += answer;
      lts.insert(lts.end(), static_cast<std::size_t>(answer), row(begin));
    }
  }
  return causal_until(std::move(lts));
}

Mask global_sliding_window(int64_t seqlen, int64_t global_tokens, int64_t window) {
  check_not_negative("seqlen", seqlen);
  check_total(seqlen);
  check_not_negative("global_tokens", global_tokens);
  check_not_negative("window", window);
  const int64_t global = std::min(global_tokens, seqlen), reach = std::min(window, seqlen);
  MaskParts parts{.seqlen_q = seqlen, .seqlen_k = seqlen};
  parts.lts.assign(static_cast<std::size_t>(seqlen), row(seqlen));
  parts.uts.assign(static_cast<std::size_t>(seqlen), row(global));
  parts.ute.assign(static_cast<std::size_t>(seqlen), row(global));
  for (int64_t j = global; j < seqlen; ++j) {
    // Beyond the global rows, the column is seen from rows j - window to j + window.
    const auto at = static_cast<std::size_t>(j);
    parts.lts[at] = row(std::min(j + reach + 1, seqlen));
    parts.ute[at] = row(std::max(j - reach, global));
  }
  return Mask(std::move(parts));
}

Mask causal_blockwise(const Documents& blocks) {
  const int64_t last = blocks.count() - 1;
  const int64_t test_begin = blocks.count() > 0 ? blocks.begin(last) : 0;
  MaskParts parts{.seqlen_q = blocks.total(), .seqlen_k = blocks.total(), .band = Band::causal()};
  for (int64_t n = 0; n < blocks.count(); ++n) {
    parts.lts.insert(parts.lts.end(), static_cast<std::size_t>(blocks.length(n)), row(blocks.end(n)));
    parts.lte.insert(parts.lte.end(), static_cast<std::size_t>(blocks.length(n)),
                     row(n == last ? blocks.total() : test_begin));
  }
  return Mask(std::move(parts));
}

Mask prefix_lm_causal(int64_t seqlen, int64_t prefix) {
  check_not_negative("seqlen", seqlen);
  check_total(seqlen);
  if (prefix < 0 || prefix > seqlen) throw_invalid("prefix is ", prefix, "; it must be between 0 and seqlen, ", seqlen);
  std::vector<int32_t> ute = rows(seqlen);
  for (int64_t j = prefix; j < seqlen; ++j) ute[static_cast<std::size_t>(j)] = row(j);
  return Mask({.seqlen_q = seqlen, .seqlen_k = seqlen, .ute = std::move(ute)});
}

Mask prefix_lm_document(const Documents& documents, std::span<const int64_t> prefix) {
  if (static_cast<int64_t>(prefix.size()) != documents.count()) {
    throw_invalid("prefix has ", prefix.size(), " entries; it needs one for each of the ", documents.count(),
                  " documents");
  }
  MaskParts parts{.seqlen_q = documents.total(), .seqlen_k = documents.total()};
  for (int64_t n = 0; n < documents.count(); ++n) {
    const int64_t own = prefix[static_cast<std::size_t>(n)];
    if (own < 0 || own > documents.length(n)) {
      throw_invalid("prefix[", n, "] is ", own, "; it must be between 0 and the document's length, ",
                    documents.length(n));
    }
    parts.lts.insert(parts.lts.end(), static_cast<std::size_t>(documents.length(n)), row(documents.end(n)));
    parts.ute.insert(parts.ute.end(), static_cast<std::size_t>(own), row(documents.begin(n)));
    for (int64_t j = documents.begin(n) + own; j < documents.end(n); ++j) parts.ute.push_back(row(j));
  }
  return Mask(std::move(parts));
}

Mask qk_sparse(int64_t seqlen, std::span<const Span> dropped) {
  check_not_negative("seqlen", seqlen);
  check_total(seqlen);
  MaskParts parts{.seqlen_q = seqlen, .seqlen_k = seqlen, .band = Band::causal()};
  parts.lts.assign(static_cast<std::size_t>(seqlen), row(seqlen));
  parts.lte.assign(static_cast<std::size_t>(seqlen), row(seqlen));
  check_spans("dropped", dropped, seqlen);
  for (const Span span : dropped) {
    for (int64_t j = span.begin; j < span.end; ++j) {
      parts.lts[static_cast<std::size_t>(j)] = row(j);
      parts.lte[static_cast<std::size_t>(j)] = row(span.end);
    }
  }
  return Mask(std::move(parts));
}

Mask hash_sparse(std::span<const int64_t> query_buckets, std::span<const int64_t> key_buckets, bool causal) {
  const auto seqlen_q = static_cast<int64_t>(query_buckets.size()), seqlen_k = static_cast<int64_t>(key_buckets.size());
  check_total(std::max(seqlen_q, seqlen_k));
  std::unordered_map<int64_t, std::vector<rules::Interval>> seen_from;  // bucket -> runs of query rows
  for (int64_t i = 0; i < seqlen_q; ++i) {
    auto& runs = seen_from[query_buckets[static_cast<std::size_t>(i)]];
    if (!runs.empty() && runs.back().end == row(i)) {
      ++runs.back().end;
    } else {
      runs.push_back({row(i), row(i + 1)});
    }
  }
  HiddenColumns columns(seqlen_q, seqlen_k, 1, 1);
  const int64_t q_offset = seqlen_k - seqlen_q;
  std::vector<rules::Interval> hidden;
  for (int64_t j = 0; j < seqlen_k; ++j) {
    hidden.clear();
    const int32_t first =
        causal ? rules::clamp_row(j - q_offset, row(seqlen_q)) : 0;  // rows before see nothing of key j
    int32_t from = first;
    if (const auto found = seen_from.find(key_buckets[static_cast<std::size_t>(j)]); found != seen_from.end()) {
      for (const rules::Interval& run : found->second) {
        if (run.end <= first) continue;
        if (from < run.begin) hidden.push_back({from, run.begin});
        from = run.end;
      }
    }
    if (from < row(seqlen_q)) hidden.push_back({from, row(seqlen_q)});
    if (hidden.size() > 2) {
      throw Error(ErrorCode::kUnrepresentable,
                  message("the hash-sparse mask does not fit two row intervals per key column: column ", j, " needs ",
                          hidden.size(), "; sort the queries by bucket, so that the rows of each are contiguous"));
    }
    hidden.push_back({0, first});
    columns.append(hidden);
  }
  const std::array candidates{causal ? Band::causal() : Band::none()};
  return Mask(fit_two_intervals(columns, candidates, q_offset, "the hash-sparse mask"));
}

Mask eviction(std::span<const int64_t> evicted_at) {
  const auto seqlen = static_cast<int64_t>(evicted_at.size());
  check_total(seqlen);
  std::vector<int32_t> lts = rows(seqlen);
  for (std::size_t j = 0; j < lts.size(); ++j) lts[j] = row(std::clamp<int64_t>(evicted_at[j], 0, seqlen));
  return causal_until(std::move(lts));
}

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

Mask prefix_tree(std::span<const int64_t> parents, std::span<const int64_t> lengths) {
  const std::size_t nodes = parents.size();
  if (!lengths.empty() && lengths.size() != nodes)
    throw_invalid("lengths has ", lengths.size(), " entries; it needs one for each of the ", nodes, " nodes");
  std::vector<int64_t> tin(nodes), tout(nodes);
  std::vector<std::size_t> path;  // the nodes from the root to the current one
  int64_t tokens = 0;
  const auto leave_until = [&](int64_t node) {
    for (; !path.empty() && static_cast<int64_t>(path.back()) != node; path.pop_back()) tout[path.back()] = tokens;
  };
  for (std::size_t n = 0; n < nodes; ++n) {
    if (parents[n] < -1 || parents[n] >= static_cast<int64_t>(n)) {
      throw_invalid("parents[", n, "] is ", parents[n], "; a parent must be -1 (a root) or an earlier node");
    }
    leave_until(parents[n]);
    if (parents[n] >= 0 && path.empty()) {
      throw_invalid("node ", n, " with parent ", parents[n],
                    " breaks the depth-first order: the parent's subtree ended before it");
    }
    const int64_t length = lengths.empty() ? 1 : lengths[n];
    check_length("lengths", static_cast<int64_t>(n), length);
    check_total(length);
    tin[n] = tokens;
    tokens += length;
    check_total(tokens);
    path.push_back(n);
  }
  leave_until(-1);
  return prefix_tree_from_intervals(tin, tout);
}

Mask prefix_tree_from_intervals(std::span<const int64_t> tin, std::span<const int64_t> tout) {
  if (tin.size() != tout.size())
    throw_invalid("tin has ", tin.size(), " entries and tout ", tout.size(), "; they must be equal");
  std::vector<int64_t> open;  // ends of the subtrees around the current node
  int64_t written = 0;        // tokens that have their node
  std::vector<int32_t> lts;
  const auto close = [&] {
    while (!open.empty() && open.back() == written) open.pop_back();
  };
  for (std::size_t n = 0; n < tin.size(); ++n) {
    close();
    const int64_t around = open.empty() ? kMaxSeqlen : open.back();
    if (tin[n] != written || tout[n] < tin[n] || tout[n] > around) {
      throw_invalid("node ", n, " has the interval [", tin[n], ", ", tout[n],
                    "); in depth-first order it must begin at ", written, " and end in [", written, ", ", around,
                    "], inside of its parent's");
    }
    const bool has_child = n + 1 < tin.size() && tin[n + 1] < tout[n];
    written = has_child ? std::max(tin[n + 1], tin[n]) : tout[n];
    lts.resize(static_cast<std::size_t>(written), row(tout[n]));
    open.push_back(tout[n]);
  }
  close();
  if (!open.empty())
    throw_invalid("a node's interval ends at ", open.back(), ", but its last child ends at ", written,
                  "; a node's own tokens come before its children");
  return causal_until(std::move(lts));
}

Mask padding(int64_t seqlen_q, int64_t seqlen_k, std::span<const int64_t> key_lengths,
             std::span<const int64_t> query_lengths) {
  check_not_negative("seqlen_q", seqlen_q);
  check_not_negative("seqlen_k", seqlen_k);
  check_total(std::max(seqlen_q, seqlen_k));
  if (key_lengths.empty()) throw_invalid("key_lengths is empty; it needs one entry for each batch entry");
  if (!query_lengths.empty() && query_lengths.size() != key_lengths.size()) {
    throw_invalid("query_lengths has ", query_lengths.size(), " entries and key_lengths ", key_lengths.size(),
                  "; they must be equal");
  }
  MaskParts parts{.seqlen_q = seqlen_q, .seqlen_k = seqlen_k, .batch = static_cast<int64_t>(key_lengths.size())};
  for (std::size_t b = 0; b < key_lengths.size(); ++b) {
    const int64_t keys = key_lengths[b], queries = query_lengths.empty() ? seqlen_q : query_lengths[b];
    if (keys < 0 || keys > seqlen_k)
      throw_invalid("key_lengths[", b, "] is ", keys, "; it must be between 0 and seqlen_k, ", seqlen_k);
    if (queries < 0 || queries > seqlen_q)
      throw_invalid("query_lengths[", b, "] is ", queries, "; it must be between 0 and seqlen_q, ", seqlen_q);
    parts.lts.insert(parts.lts.end(), static_cast<std::size_t>(keys), row(queries));
    parts.lts.insert(parts.lts.end(), static_cast<std::size_t>(seqlen_k - keys), 0);
  }
  return Mask(std::move(parts));
}

}  // namespace masks
}  // namespace flashmask
