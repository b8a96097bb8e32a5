// SPDX-License-Identifier: Apache-2.0
#pragma once

// The families as functions of a key column j: which rows its two intervals hide. What each family means stands in
// builders.h and model_masks.h; here is how it fits two intervals. Runs on the host and on devices.

#include "mask/families/buckets.h"
#include "mask/families/minima.h"
#include "mask/families/segments.h"

namespace flashmask::build {

inline constexpr int64_t kToEnd = INT64_MAX;
/// Farther than any key or block; products of two do not overflow.
inline constexpr int64_t kFarthest = INT32_MAX;

/// The intervals [lts, lte) and [uts, ute) of a column, to be clamped to the rows. As it stands nothing is hidden.
struct Column {
  int64_t lts = kToEnd, lte = kToEnd, uts = 0, ute = 0;
};

/// Seen by the rows from `begin` to `end` alone.
FLASHMASK_COLUMN Column seen_by(int64_t begin, int64_t end) { return {.lts = end, .ute = begin}; }

FLASHMASK_COLUMN int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
FLASHMASK_COLUMN int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
/// a % b of tokens, which 32 bits hold.
FLASHMASK_COLUMN int64_t remainder(int64_t a, int64_t b) { return static_cast<uint32_t>(a) % static_cast<uint32_t>(b); }

struct CausalDocument {
  Segments documents;
  FLASHMASK_COLUMN Column operator()(const Lead& lead, int64_t j) const {
    return {.lts = documents.place(lead, j).end};
  }
};

struct Document {
  Segments documents;
  FLASHMASK_COLUMN Column operator()(const Lead& lead, int64_t j) const {
    const Place own = documents.place(lead, j);
    return seen_by(own.begin, own.end);
  }
};

struct PrefixLmDocument {
  Segments documents;
  Integers prefix;
  FLASHMASK_COLUMN Column operator()(const Lead& lead, int64_t j) const {
    const Place own = documents.place(lead, j);
    const int64_t length = own.index < prefix.count ? prefix(lead, own.index) : 0;
    return seen_by(j - own.begin < length ? own.begin : j, own.end);
  }
};

struct CausalBlockwise {
  Segments blocks;
  FLASHMASK_COLUMN Column operator()(const Lead& lead, int64_t j) const {
    const int64_t last_begin = blocks.last_begin(lead);
    if (j >= last_begin) return {};
    return {.lts = blocks.place(lead, j).end, .lte = last_begin};
  }
};

/// A question's keys are seen to the end of its group, an answer's to its own.
struct SharedQuestion {
  Segments segments;
  Integers is_question;
  Integers group;      ///< of each segment, counted from 1
  Integers group_end;  ///< of each group
  FLASHMASK_COLUMN Column operator()(const Lead& lead, int64_t j) const {
    const Place own = segments.place(lead, j);
    const bool to_group_end = own.index < segments.count() && is_question(lead, own.index) != 0;
    return {.lts = to_group_end ? group_end(lead, group(lead, own.index) - 1) : own.end};
  }
};

struct GlobalSlidingWindow {
  int64_t seqlen, global_tokens, window;
  FLASHMASK_COLUMN Column operator()(const Lead&, int64_t j) const {
    const int64_t global = smaller(global_tokens, seqlen), reach = smaller(window, seqlen);
    if (j < global) return {.uts = global, .ute = global};
    return {.lts = j + reach + 1, .uts = global, .ute = larger(j - reach, global)};
  }
};

struct PrefixLmCausal {
  Integers prefix;
  FLASHMASK_COLUMN Column operator()(const Lead& lead, int64_t j) const { return {.ute = j < prefix(lead, 0) ? 0 : j}; }
};

struct QkSparse {
  Integers begin, end;  ///< of the dropped spans
  Search search;
  FLASHMASK_COLUMN Column operator()(const Lead& lead, int64_t j) const {
    const int64_t spans = search(begin, lead, begin.count, j);  // those that begin at or before the key
    const int64_t until = spans > 0 ? end(lead, spans - 1) : 0;
    return j < until ? Column{.lts = j, .lte = until} : Column{};
  }
};

struct Eviction {
  Integers evicted_at;
  FLASHMASK_COLUMN Column operator()(const Lead& lead, int64_t j) const { return {.lts = evicted_at(lead, j)}; }
};

/// A tree whose nodes are tokens. Next(lead, node) is the first node after a node's subtree.
template <typename Next>
struct TokenTree {
  int64_t nodes;
  Next next;
  FLASHMASK_COLUMN Column operator()(const Lead& lead, int64_t j) const {
    return {.lts = j < nodes ? next(lead, j) : nodes};
  }
};

template <typename Next>
struct PrefixTree {
  Segments nodes;
  Next next;
  FLASHMASK_COLUMN Column operator()(const Lead& lead, int64_t j) const {
    const Place node = nodes.place(lead, j);
    if (node.index >= nodes.count()) return {.lts = node.end};
    // Neighbouring tokens mostly share a node.
    if (lead.index != found.lead || node.index != found.node)
      found = {lead.index, node.index, nodes.end_of_first(lead, next(lead, node.index))};
    return {.lts = found.end};
  }

  struct Found {
    int64_t lead = -1, node = 0, end = 0;
  };
  mutable Found found{};
};

/// In depth-first order a node's subtree ends before the first later node whose parent is an earlier one than the node.
struct NextOutside {
  Minima parents;
  FLASHMASK_COLUMN int64_t operator()(const Lead& lead, int64_t node) const {
    return parents.first_below(lead, static_cast<int32_t>(node), node + 1, parents.count);
  }
};

struct PrefixTreeFromIntervals {
  Integers tin, tout;
  Search search;
  FLASHMASK_COLUMN Column operator()(const Lead& lead, int64_t j) const {
    const int64_t nodes = search(tin, lead, tin.count, j);  // those that begin at or before the token
    return {.lts = nodes > 0 ? tout(lead, nodes - 1) : 0};
  }
};

struct Padding {
  Integers key_lengths, query_lengths;
  FLASHMASK_COLUMN Column operator()(const Lead& lead, int64_t j) const {
    return {.lts = j < key_lengths(lead, 0) ? query_lengths(lead, 0) : 0};
  }
};

struct AttentionSinkWindow {
  Segments documents;
  int64_t sink, reach;
  FLASHMASK_COLUMN Column operator()(const Lead& lead, int64_t j) const {
    const Place own = documents.place(lead, j);
    return {.lts = j - own.begin < sink ? own.end : smaller(j + reach, own.end)};
  }
};

/// Blocks of one length, counted from where a document begins, or of given lengths.
struct Blocks {
  int64_t length;  ///< 0: given lengths
  Segments given;

  struct Bounds {
    int64_t begin, until;  ///< the block's begin, and where the first block begins that does not see it
  };
  /// reach: in blocks, the own one included. Both ends are within the document.
  FLASHMASK_COLUMN Bounds bounds(const Lead& lead, const Place& document, int64_t token, int64_t reach) const {
    int64_t begin, until;
    if (length > 0) {
      begin = token - remainder(token - document.begin, length);
      until = begin + reach * length;
    } else {
      const Place own = given.place(lead, token);
      begin = own.begin;
      until = given.end_of_first(lead, smaller(own.index + smaller(reach, given.count()), given.count()));
    }
    return {larger(begin, document.begin), smaller(until, document.end)};
  }
};

struct BlockCausal {
  Segments documents;
  Blocks blocks;
  int64_t reach;
  FLASHMASK_COLUMN Column operator()(const Lead& lead, int64_t j) const {
    const Blocks::Bounds own = blocks.bounds(lead, documents.place(lead, j), j, reach);
    return seen_by(own.begin, own.until);
  }
};

struct CausalWithBlocks {
  Segments documents, runs;  ///< runs of equal ids, which may go on in the next document
  Integers block_ids;
  int64_t reach;
  FLASHMASK_COLUMN Column operator()(const Lead& lead, int64_t j) const {
    const bool inside = block_ids(lead, j) >= 0;
    const Place document = documents.place(lead, j), run = inside ? runs.place(lead, j) : alone(j);
    return column(document, run, inside, j);
  }
  /// inside: whether the token is in a block, the run of ids as far as it is in the document; otherwise it is alone.
  FLASHMASK_COLUMN Column column(const Place& document, const Place& run, bool inside, int64_t j) const {
    const int64_t begin = inside ? larger(run.begin, document.begin) : j;
    return seen_by(begin, smaller(larger(run.end, j + reach), document.end));
  }
  FLASHMASK_COLUMN static Place alone(int64_t j) { return {0, j, j + 1}; }
};

/// A token's block in the text of a block diffusion. All are empty and beyond the last for a token that is hidden.
struct DiffusionBlock {
  int64_t begin, end, until;  ///< until: where its document ends
  bool visible;
};

struct DiffusionBlocks {
  Segments documents;
  Blocks blocks;
  int64_t seqlen;
  FLASHMASK_COLUMN DiffusionBlock operator()(const Lead& lead, int64_t token) const {
    const Place document = documents.place(lead, token);
    const Blocks::Bounds own = blocks.bounds(lead, document, token, 1);
    const Blocks::Bounds all = blocks.bounds(lead, document, token, kFarthest);
    return {own.begin, own.until, all.until, own.until > token};
  }
  /// Whether a clean key of the block is hidden from no more than two runs of rows if all noisy copies come first.
  FLASHMASK_COLUMN bool fits_concatenated(const DiffusionBlock& own) const {
    return !own.visible || own.end == own.until || own.until >= seqlen;
  }
  /// How many tokens are visible: they come first.
  FLASHMASK_COLUMN int64_t visible(const Lead& lead) const {
    const int64_t of_documents = smaller(documents.total(lead), seqlen);
    return blocks.length > 0 ? of_documents : smaller(of_documents, blocks.given.total(lead));
  }
};

struct Eagle3Ttt {
  Segments documents;
  int64_t seqlen;
  FLASHMASK_COLUMN Column operator()(const Lead& lead, int64_t j) const {
    const int64_t token = remainder(j, seqlen), end = documents.place(lead, token).end;
    return seen_by(token, j < seqlen ? end : end > token ? token + 1 : 0);
  }
};

struct Dflash {
  Segments documents;
  Integers anchors;
  int64_t context, block;
  Search before, until;  ///< blocks anchored up to a key, and before a document's end

  /// Blocks that are not there have no key of the context before them and no document after.
  FLASHMASK_COLUMN int64_t anchor(const Lead& lead, int64_t n) const {
    const int64_t at = anchors(lead, n);
    return at >= 0 ? at : context + 1;
  }
  FLASHMASK_COLUMN Column operator()(const Lead& lead, int64_t j) const {
    if (j >= context) {
      const int64_t row = j - context, number = static_cast<uint32_t>(row) / static_cast<uint32_t>(block);
      return seen_by(number * block, anchors(lead, number) >= 0 ? (number + 1) * block : 0);
    }
    const auto at = [this](const Lead& l, int64_t n) { return anchor(l, n); };
    // The place after the context belongs to the document of the last token.
    const auto in_document = [this](const Lead& l, int64_t n) {
      const int64_t x = anchor(l, n);
      return x == context ? context - 1 : x;
    };
    const int64_t end = documents.place(lead, j).end;
    return seen_by(before(at, lead, anchors.count, j) * block,
                   until(in_document, lead, anchors.count, end - 1) * block);
  }
};

/// The rows from the diagonal on that are in another bucket than the key are hidden.
struct HashSparse {
  int64_t seqlen_q, seqlen_k;
  bool causal;
  Integers key_buckets;
  BucketTable rows;
  int32_t* unfit;  ///< becomes 1 if a column takes more than two intervals; may be null

  /// The first row that the band lets see the key.
  FLASHMASK_COLUMN int64_t first_row(int64_t j) const {
    return causal ? smaller(larger(j - (seqlen_k - seqlen_q), 0), seqlen_q) : 0;
  }

  struct Hidden {
    Column column;
    int64_t intervals;  ///< how many it would take, if no more than two
  };
  /// From the first row on, of a key in the bucket.
  FLASHMASK_COLUMN Hidden hidden(const Bucket& runs, int64_t first) const {
    int count = 0;  // of the runs that reach the first row
    for (int n = 0; n < Bucket::kRuns; ++n) count += runs.last[n] > first;
    const int64_t begin = runs.first[smaller(larger(count, 1), Bucket::kRuns - 1) - 1] - 1, last = runs.last[0];
    const int64_t seen = count > 0 ? larger(begin, first) : seqlen_q, end = count > 0 ? last : seqlen_q;
    // If it fits, no more than two of these are not empty: those before the first run, between two, after the last.
    Hidden its{{.lts = 0, .lte = 0, .uts = end, .ute = seqlen_q}, 0};
    const auto hide = [&its](int64_t from, int64_t to) {
      if (from >= to) return;
      if (its.intervals++ == 0) its.column.lts = from, its.column.lte = to;
      its.column.uts = from, its.column.ute = to;
    };
    hide(0, seen > first ? seen : 0);
    for (int n = count - 1; n > 0; --n) hide(runs.last[n], runs.first[n - 1] - 1);
    hide(end, seqlen_q);
    return its;
  }
  FLASHMASK_COLUMN Column operator()(const Lead& lead, int64_t j) const {
    const Hidden it = hidden(bucket_of(lead, key_buckets(lead, j)), first_row(j));
    if (it.intervals > 2 && unfit) *unfit = 1;
    return it.column;
  }

  /// Neighbouring keys often share a bucket.
  struct Found {
    int64_t lead = -1, key = 0;
    const Bucket* bucket = nullptr;
  };
  FLASHMASK_COLUMN const Bucket& bucket_of(const Lead& lead, int64_t key) const {
    if (lead.index != found.lead || key != found.key) found = {lead.index, key, rows.find(lead, key)};
    return *found.bucket;
  }
  mutable Found found{};
};

}  // namespace flashmask::build
