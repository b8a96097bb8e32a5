// SPDX-License-Identifier: Apache-2.0
#include "families/families.h"

#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

#include "families/draw.h"
#include "families/reader.h"

namespace flashmask {
namespace {

Mask shared_question(Reader& r) {
  const std::vector<int64_t> group_lengths = r.lengths("groups", r.seqlen);
  const std::vector<int64_t> counts = r.integers("answers");
  if (counts.size() > group_lengths.size()) {
    throw_invalid("shared_question: parameter answers has ", counts.size(), " counts; there are ", group_lengths.size(),
                  " groups, and each takes one");
  }
  std::vector<QuestionGroup> groups;
  for (std::size_t g = 0; g < group_lengths.size(); ++g) {
    const int64_t count = counts.empty() ? r.random.integer(2, 6) : counts[g % counts.size()];
    if (count < 0 || (!counts.empty() && count > group_lengths[g])) {
      throw_invalid("shared_question: parameter answers has ", count, "; it must be between 0 and the length of group ",
                    g, ", ", group_lengths[g]);
    }
    // As in the paper's data (appendix A.2): an answer has 10 to 20 % of the question's length.
    QuestionGroup group;
    double shares = 1;
    std::vector<double> share;
    for (int64_t n = 0; n < std::min(count, group_lengths[g]); ++n)
      shares += share.emplace_back(0.1 + 0.1 * r.random.real());
    group.question = group_lengths[g];
    for (const double s : share) {
      const int64_t answer =
          std::min(group.question,
                   std::max<int64_t>(1, static_cast<int64_t>(static_cast<double>(group_lengths[g]) * s / shares)));
      group.answers.push_back(answer);
      group.question -= answer;
    }
    groups.push_back(std::move(group));
  }
  return masks::shared_question(groups);
}

Mask prefix_lm_document(Reader& r) {
  const Documents documents = Documents::from_lengths(r.lengths("lengths", r.seqlen));
  std::vector<int64_t> prefix = r.integers("prefix");
  if (prefix.empty()) {
    for (int64_t n = 0; n < documents.count(); ++n) {
      prefix.push_back(static_cast<int64_t>(static_cast<double>(documents.length(n)) * (0.1 + 0.4 * r.random.real())));
    }
  }
  return masks::prefix_lm_document(documents, prefix);
}

Mask qk_sparse(Reader& r) {
  std::vector<Span> spans = r.spans("spans");
  if (spans.empty()) {
    // The spans of the paper's benchmark at 8192, scaled.
    const auto scaled = [&](int64_t at) { return at * r.seqlen / 8192; };
    spans = {{scaled(1024), scaled(1024 + 538)}, {scaled(2358), scaled(2358 + 1700)}};
  }
  return masks::qk_sparse(r.seqlen, spans);
}

Mask hash_sparse(Reader& r) {
  std::vector<int64_t> queries = r.integers("query_buckets"), keys = r.integers("key_buckets");
  const int64_t buckets = r.integer("buckets", 8);
  if (buckets < 1) throw_invalid("hash_sparse: parameter buckets is ", buckets, "; it must be at least 1");
  // Sorted by bucket, as the masked attention of a hashing layer sees its queries; keys in their own order.
  if (queries.empty()) {
    for (int64_t i = 0; i < r.seqlen; ++i) queries.push_back(r.random.integer(0, buckets - 1));
    std::sort(queries.begin(), queries.end());
  }
  if (keys.empty()) {
    for (int64_t j = 0; j < r.seqlen; ++j) keys.push_back(r.random.integer(0, buckets - 1));
    std::sort(keys.begin(), keys.end());
  }
  if (static_cast<int64_t>(queries.size()) != r.seqlen || static_cast<int64_t>(keys.size()) != r.seqlen) {
    throw_invalid("hash_sparse: query_buckets has ", queries.size(), " and key_buckets ", keys.size(),
                  " entries; both must have seqlen, ", r.seqlen);
  }
  return masks::hash_sparse(queries, keys, r.integer("causal", 1) != 0);
}

Mask random_eviction(Reader& r) {
  return masks::random_eviction(r.seqlen, static_cast<uint64_t>(r.integer("seed", r.random.integer(0, INT64_MAX))));
}

Mask eviction(Reader& r) {
  std::vector<int64_t> evicted_at = r.integers("evicted_at");
  if (evicted_at.empty()) {
    for (int64_t j = 0; j < r.seqlen; ++j) evicted_at.push_back(r.random.integer(j + 1, r.seqlen));
  }
  if (static_cast<int64_t>(evicted_at.size()) != r.seqlen)
    throw_invalid("eviction: evicted_at has ", evicted_at.size(), " entries; it needs seqlen, ", r.seqlen);
  return masks::eviction(evicted_at);
}

Mask prefix_tree(Reader& r) {
  std::vector<int64_t> parents = r.integers("parents");
  if (parents.empty()) {
    const auto nodes = static_cast<int64_t>(r.draw_lengths(r.seqlen, r.random.integer(4, 12)).size());
    std::vector<int64_t> path;
    for (int64_t n = 0; n < nodes; ++n) {
      // Up to two roots; elsewhere a child of the node before it or of one of that node's ancestors.
      const int64_t up = path.empty() ? 0 : r.random.integer(n == nodes / 2 ? 0 : 1, static_cast<int64_t>(path.size()));
      path.resize(static_cast<std::size_t>(up));
      parents.push_back(path.empty() ? -1 : path.back());
      path.push_back(n);
    }
  }
  std::vector<int64_t> lengths = r.integers("lengths");
  if (lengths.empty()) {
    const auto nodes = static_cast<int64_t>(parents.size());
    lengths.assign(parents.size(), 0);
    for (int64_t n = 0; n < nodes; ++n)
      lengths[static_cast<std::size_t>(n)] = r.seqlen * (n + 1) / nodes - r.seqlen * n / nodes;
  } else {
    lengths = r.lengths("lengths", r.seqlen);
  }
  return masks::prefix_tree(parents, lengths);
}

Mask block_causal(Reader& r) {
  const Documents documents = r.documents("lengths", r.seqlen);
  const Documents blocks = r.blocks("blocks", documents, std::max<int64_t>(r.seqlen / 8, 1));
  return masks::block_causal(blocks, documents, r.integer("window", -1));
}

/// Each document in pieces of text and, every second one, a block.
std::vector<Span> draw_blocks(Reader& r, const Documents& documents) {
  std::vector<Span> blocks;
  for (int64_t n = 0; n < documents.count(); ++n) {
    int64_t at = documents.begin(n);
    bool is_text = false;
    for (const int64_t piece : r.draw_lengths(documents.length(n), r.random.integer(3, 7))) {
      is_text = !is_text;
      if (!is_text) blocks.push_back({at, at + piece});
      at += piece;
    }
  }
  return blocks;
}

Mask causal_with_blocks(Reader& r) {
  const Documents documents = r.documents("lengths", r.seqlen);
  std::vector<Span> blocks = r.spans("blocks");
  if (blocks.empty()) blocks = draw_blocks(r, documents);
  return masks::causal_with_blocks(documents, blocks, r.integer("window", -1));
}

/// A family is square. The mask's rows are those from first_row on, its keys the first; other rows and keys are hidden.
/// For masks that are LTS and UTE alone.
Mask in_square(const Mask& mask, int64_t seqlen, int64_t first_row) {
  MaskParts parts{.seqlen_q = seqlen, .seqlen_k = seqlen};
  for (const int32_t begin : mask.ute()) parts.ute.push_back(begin + static_cast<int32_t>(first_row));
  for (const int32_t end : mask.lts()) parts.lts.push_back(end + static_cast<int32_t>(first_row));
  parts.ute.resize(static_cast<std::size_t>(seqlen), 0);
  parts.lts.resize(static_cast<std::size_t>(seqlen), 0);
  return Mask(std::move(parts));
}

Mask block_diffusion(Reader& r) {
  const int64_t text = r.seqlen / 2;
  const Documents documents = r.documents("lengths", text);
  const Documents blocks = r.blocks("blocks", documents, std::max<int64_t>(text / 8, 1));
  if (r.integer("concatenated", 0) == 0) return in_square(masks::block_diffusion(blocks, documents).mask, r.seqlen, 0);
  if (r.seqlen % 2 != 0)
    throw_invalid("block_diffusion: seqlen is ", r.seqlen, "; with parameter concatenated it must be even");
  return masks::block_diffusion(blocks, documents, BlockDiffusionOrder::kConcatenated).mask;
}

Mask eagle3_ttt(Reader& r) {
  const int64_t steps = r.positive("steps", 4), text = r.seqlen / steps;
  return in_square(masks::eagle3_ttt(r.documents("lengths", text), steps), r.seqlen, (steps - 1) * text);
}

Mask dflash(Reader& r) {
  const int64_t block = r.positive("block", std::clamp<int64_t>(r.seqlen / 16, 1, 16));
  std::vector<int64_t> anchors = r.integers("anchors");
  const auto most = static_cast<std::size_t>(r.seqlen / block);
  if (anchors.size() > most)
    throw_invalid("dflash: parameter anchors has ", anchors.size(), " entries; seqlen, ", r.seqlen, ", has room for ",
                  most, " blocks of ", block);
  const int64_t blocks = anchors.empty() ? r.seqlen / 2 / block : static_cast<int64_t>(anchors.size());
  const int64_t context = r.seqlen - blocks * block;
  if (anchors.empty()) {
    for (int64_t n = 0; n < blocks; ++n) anchors.push_back(r.random.integer(0, context - 1));
    std::sort(anchors.begin(), anchors.end());
  }
  return in_square(masks::dflash(r.documents("lengths", context), anchors, block), r.seqlen, context);
}

Mask neighborhood_2d(Reader& r) {
  int64_t divisor = 1;
  for (int64_t n = 2; n * n <= r.seqlen; ++n) divisor = r.seqlen % n == 0 ? n : divisor;
  const int64_t height = r.positive("height", divisor), width = r.seqlen / height;
  if (height * width != r.seqlen)
    throw_invalid("neighborhood_2d: parameter height is ", height, "; it must divide seqlen, ", r.seqlen);
  const int64_t dilation = r.positive("dilation", 1);
  const auto kernel = [&](const char* name, int64_t side) {
    return r.integer(name, std::clamp<int64_t>(side / dilation, 1, 5));
  };
  return masks::neighborhood_2d(height, width, kernel("kernel_height", height), kernel("kernel_width", width),
                                dilation);
}

Mask padding(Reader& r) {
  const std::vector<int64_t> keys = r.integers("key_lengths"), queries = r.integers("query_lengths");
  if (!keys.empty()) return masks::padding(r.seqlen, r.seqlen, keys, queries);
  const std::vector<int64_t> drawn{r.random.integer((r.seqlen + 1) / 2, r.seqlen)};
  return masks::padding(r.seqlen, r.seqlen, drawn, queries.empty() ? drawn : queries);
}

// --- Random parameters, for verify and the tests ------------------------------------------------------

FamilyParameters draw_documents(Draw& d) { return {{"lengths", d.documents()}}; }

/// Cuts each document into five pieces; the second and the fourth are blocks.
FamilyParameters draw_causal_with_blocks(Draw& d) {
  const std::vector<int64_t> documents = d.lengths(d.length, d.own.integer(1, 4));
  std::vector<int64_t> bounds;
  int64_t at = 0;
  for (const int64_t document : documents) {
    const std::vector<int64_t> pieces = d.lengths(document, 5);
    const int64_t second = at + pieces[0], fourth = second + pieces[1] + pieces[2];
    bounds.insert(bounds.end(), {second, second + pieces[1], fourth, fourth + pieces[3]});
    at += document;
  }
  return {{"lengths", text(documents)}, {"blocks", text(bounds)}, {"window", d.window_of(d.length / 2)}};
}

FamilyParameters draw_block_diffusion(Draw& d) {
  const bool concatenated = d.length % 2 == 0 && d.own.flip();
  const std::vector<int64_t> documents = d.lengths(d.length / 2, d.own.integer(1, 4));
  return {{"lengths", text(documents)},
          {"blocks", text(d.lengths(d.length / 2, d.own.integer(2, 8)))},
          {"concatenated", concatenated ? "1" : "0"}};
}

FamilyParameters draw_eagle3_ttt(Draw& d) {
  const int64_t steps = d.own.integer(1, 4);
  return {{"steps", std::to_string(steps)}, {"lengths", text(d.lengths(d.length / steps, d.own.integer(1, 4)))}};
}

/// At least one block, where one fits: no entry at all would leave the anchors to the family.
FamilyParameters draw_dflash(Draw& d) {
  const int64_t block = d.own.integer(1, std::max<int64_t>(d.length / 3, 1)),
                blocks = d.own.integer(1, std::clamp<int64_t>(d.length / block, 1, 9));
  const int64_t context = std::max<int64_t>(d.length - blocks * block, 0);
  std::vector<int64_t> anchors;
  for (int64_t n = 0; n < std::min(blocks, d.length / block); ++n) anchors.push_back(d.own.integer(0, context));
  std::sort(anchors.begin(), anchors.end());
  FamilyParameters parameters{{"block", std::to_string(block)},
                              {"lengths", text(d.lengths(context, d.own.integer(1, 4)))}};
  if (!anchors.empty()) parameters["anchors"] = text(anchors);
  return parameters;
}

FamilyParameters draw_shared_question(Draw& d) {
  const std::vector<int64_t> groups = d.lengths(d.length, d.own.integer(1, 4));
  std::vector<int64_t> counts, answers;
  for (const int64_t group : groups) {
    counts.push_back(d.own.integer(0, 5));
    // One piece more than answers: the first is the question.
    const std::vector<int64_t> pieces = d.lengths(group, counts.back() + 1);
    answers.insert(answers.end(), pieces.begin() + 1, pieces.end());
  }
  return {{"groups", text(groups)}, {"answers", text(counts)}, {"answer_lengths", text(answers)}};
}

FamilyParameters draw_prefix_lm_document(Draw& d) {
  const std::vector<int64_t> documents = d.lengths(d.length, d.own.integer(1, 8));
  std::vector<int64_t> prefixes;
  for (const int64_t document : documents) prefixes.push_back(d.own.integer(0, document));
  return {{"lengths", text(documents)}, {"prefix", text(prefixes)}};
}

FamilyParameters draw_qk_sparse(Draw& d) {
  std::vector<int64_t> bounds;
  for (int64_t n = d.own.integer(1, 3); n > 0; --n) {
    bounds.push_back(d.own.integer(0, d.length));
    bounds.push_back(d.own.integer(0, d.length));
  }
  std::sort(bounds.begin(), bounds.end());
  return {{"spans", text(bounds)}};
}

/// Queries are sorted by bucket, so that the mask fits two intervals; keys come in any order.
FamilyParameters draw_hash_sparse(Draw& d) {
  FamilyParameters parameters{{"causal", d.common.flip() ? "1" : "0"}};
  if (d.length == 0) return parameters;
  const int64_t buckets = d.own.integer(1, 9);
  std::vector<int64_t> queries, keys;
  for (int64_t i = 0; i < d.length; ++i) {
    queries.push_back(d.own.integer(0, buckets - 1));
    keys.push_back(d.own.integer(0, buckets - 1));
  }
  std::sort(queries.begin(), queries.end());
  if (d.own.flip()) std::sort(keys.begin(), keys.end());
  parameters["query_buckets"] = text(queries);
  parameters["key_buckets"] = text(keys);
  return parameters;
}

FamilyParameters draw_neighborhood_2d(Draw& d) {
  std::vector<int64_t> divisors;
  for (int64_t n = 1; n <= d.length; ++n) {
    if (d.length % n == 0) divisors.push_back(n);
  }
  if (divisors.empty()) return {};
  const int64_t height = divisors[static_cast<std::size_t>(d.own.integer(0, std::ssize(divisors) - 1))];
  const int64_t width = d.length / height, dilation = d.own.integer(1, std::min({height, width, int64_t{3}}));
  return {{"height", std::to_string(height)},
          {"kernel_height", std::to_string(d.own.integer(1, height / dilation))},
          {"kernel_width", std::to_string(d.own.integer(1, width / dilation))},
          {"dilation", std::to_string(dilation)}};
}

FamilyParameters draw_eviction(Draw& d) {
  if (d.length == 0) return {};
  std::vector<int64_t> evicted_at;
  for (int64_t j = 0; j < d.length; ++j) evicted_at.push_back(d.own.integer(j, d.length));
  return {{"evicted_at", text(evicted_at)}};
}

FamilyParameters draw_prefix_tree(Draw& d) {
  const int64_t nodes = d.own.integer(1, 12);
  std::vector<int64_t> parents, path;
  for (int64_t n = 0; n < nodes; ++n) {
    // A child of any node of the current path, or another root.
    path.resize(static_cast<std::size_t>(d.own.integer(0, static_cast<int64_t>(path.size()))));
    parents.push_back(path.empty() ? -1 : path.back());
    path.push_back(n);
  }
  return {{"parents", text(parents)}, {"lengths", text(d.lengths(d.length, nodes))}};
}

// --- The families and their parameters, in the order in which they are listed -------------------------

constexpr FamilyParameter kLengths{"lengths", "lengths of the documents, adding up to seqlen; 3 to 7 drawn ones"};

constexpr FamilyParameter kPacked{"lengths", "lengths of the documents, adding up to seqlen; one of all"};

constexpr FamilyParameter kOffset[] = {{"q_offset", "row i stands at key position i + q_offset; 0"}};
constexpr FamilyParameter kWindow[] = {{"left", "keys before the row's own that are visible, -1 all; seqlen / 16 - 1"},
                                       {"right", "keys after it, -1 all; 0"}};
constexpr FamilyParameter kDocuments[] = {kLengths};
constexpr FamilyParameter kGroups[] = {{"groups", "lengths of the groups, adding up to seqlen; 3 to 7 drawn ones"},
                                       {"answers", "answers of each group, repeated as needed; 2 to 6 drawn"}};
constexpr FamilyParameter kGlobal[] = {{"global", "tokens that see and are seen by all; 16, at most seqlen / 4"},
                                       {"window", "reach to either side; seqlen / 16"}};
constexpr FamilyParameter kBlocks[] = {
    {"lengths", "lengths of the blocks, the last being the test example; 3 to 7 drawn ones"}};
constexpr FamilyParameter kPrefix[] = {{"prefix", "keys that every row sees; seqlen / 2"}};
constexpr FamilyParameter kPrefixes[] = {kLengths, {"prefix", "prefix of each document; 10 to 50 % of it, drawn"}};
constexpr FamilyParameter kSpans[] = {{"spans", "begin,end of each dropped span; the paper's two, scaled to seqlen"}};
constexpr FamilyParameter kBuckets[] = {{"buckets", "how many buckets to draw from; 8"},
                                        {"query_buckets", "bucket of each query; drawn and sorted"},
                                        {"key_buckets", "bucket of each key; drawn and sorted"},
                                        {"causal", "1: also j <= i; 1"}};
constexpr FamilyParameter kSeed[] = {{"seed", "of the evictions; drawn"}};
constexpr FamilyParameter kEviction[] = {{"evicted_at", "first row that no longer sees each key; drawn"}};
constexpr FamilyParameter kTree[] = {
    {"parents", "parent of each node in depth-first order, -1 a root; 4 to 12 drawn nodes"},
    {"lengths", "tokens of each node; seqlen shared out evenly"}};
constexpr FamilyParameter kPadding[] = {
    {"key_lengths", "visible keys of each batch entry; one drawn, at least seqlen / 2"},
    {"query_lengths", "rows that see anything; as key_lengths if those are drawn, else all"}};
constexpr FamilyParameter kSinks[] = {kPacked,
                                      {"sink", "first keys of a document that its rows always see; 4"},
                                      {"window", "last keys that a row sees, its own included, -1 all; seqlen / 16"}};
constexpr FamilyParameter kFrames[] = {
    kPacked,
    {"blocks", "length of every block, or their lengths, adding up to seqlen; seqlen / 8"},
    {"window", "last blocks that a row sees, its own included, -1 all; -1"}};
constexpr FamilyParameter kImages[] = {
    kPacked,
    {"blocks", "begin,end of each block; every second of 3 to 7 drawn pieces of a document"},
    {"window", "last keys that a row sees, its own included, -1 all; -1"}};
constexpr FamilyParameter kCopies[] = {
    {"lengths", "lengths of the documents of one copy, adding up to seqlen / 2; one of all"},
    {"blocks", "length of every block, or their lengths, adding up to seqlen / 2; seqlen / 16"},
    {"concatenated", "1: the noisy copy of everything before the clean one; 0"}};
constexpr FamilyParameter kPasses[] = {
    {"steps", "passes, this one included; 4"},
    {"lengths", "lengths of the documents, adding up to seqlen / steps; one of all"}};
constexpr FamilyParameter kDilated[] = {{"window", "keys that a row sees, its own included, -1 all; seqlen / 16"},
                                        {"dilation", "distance between neighbouring keys of a window; 4"}};
constexpr FamilyParameter kRandomBlocks[] = {{"block", "tokens of a block; seqlen / 16"},
                                             {"global_blocks", "first blocks, which see and are seen by all; 1"},
                                             {"window", "blocks to either side that a block sees; 1"},
                                             {"random_blocks", "further blocks that a block sees; 2"},
                                             {"seed", "of the random blocks; a drawn one"}};
constexpr FamilyParameter kEitherSide[] = {
    {"window", "keys to either side that a row sees, its own included, -1 all; seqlen / 16, at most 16"},
    {"dilation", "distance between neighbouring keys of a window; 4"},
    {"causal", "1: only keys up to the row's own; 0"}};
constexpr FamilyParameter kGrid[] = {
    {"height", "rows of the grid, dividing seqlen; the largest divisor up to its square root"},
    {"kernel_height", "rows of a neighbourhood; 5, or what fits"},
    {"kernel_width", "tokens of each; 5, or what fits"},
    {"dilation", "distance between neighbouring tokens of a neighbourhood, both ways; 1"}};
constexpr FamilyParameter kDrafts[] = {
    {"anchors", "position of each block's first token, ascending; drawn, blocks being half of seqlen"},
    {"block", "tokens of a block; 16, at most seqlen / 16"},
    {"lengths", "lengths of the documents of the context, adding up to seqlen less the blocks; one of all"}};

struct Entry {
  Family family;
  Mask (*build)(Reader&);
  FamilyParameters (*draw)(Draw&) = nullptr;  ///< null: none
};

constexpr Entry kTable[] = {
    {{"full", "every row sees every key", {}}, [](Reader& r) { return masks::full(r.seqlen, r.seqlen); }},
    {{"causal", "j <= i + q_offset", kOffset},
     [](Reader& r) { return masks::causal(r.seqlen, r.seqlen, r.integer("q_offset", 0)); },
     [](Draw& d) -> FamilyParameters {
       return {{"q_offset", std::to_string(d.common.integer(-d.length / 4, d.length / 4))}};
     }},
    {{"sliding_window", "i - left <= j <= i + right", kWindow},
     [](Reader& r) {
       return masks::sliding_window(r.seqlen, r.seqlen, r.integer("left", std::max<int64_t>(r.seqlen / 16 - 1, 0)),
                                    r.integer("right", 0));
     },
     [](Draw& d) -> FamilyParameters {
       return {{"left", d.window_reach(d.common)}, {"right", d.window_reach(d.common)}};
     }},
    {{"causal_document", "same document and j <= i", kDocuments},
     [](Reader& r) { return masks::causal_document(Documents::from_lengths(r.lengths("lengths", r.seqlen))); },
     draw_documents},
    {{"document", "same document", kDocuments},
     [](Reader& r) { return masks::document(Documents::from_lengths(r.lengths("lengths", r.seqlen))); },
     draw_documents},
    {{"shared_question", "j <= i, same group, and j in the question or in i's own answer", kGroups},
     shared_question,
     draw_shared_question},
    {{"global_sliding_window", "i < global, or j < global, or |i - j| <= window", kGlobal},
     [](Reader& r) {
       return masks::global_sliding_window(r.seqlen, r.integer("global", std::min<int64_t>(16, r.seqlen / 4)),
                                           r.integer("window", r.seqlen / 16));
     },
     [](Draw& d) -> FamilyParameters {
       return {{"global", d.up_to(d.length / 4)}, {"window", d.up_to(d.length / 3)}};
     }},
    {{"causal_blockwise", "j <= i, and same block or i in the last block", kBlocks},
     [](Reader& r) { return masks::causal_blockwise(Documents::from_lengths(r.lengths("lengths", r.seqlen))); },
     draw_documents},
    {{"prefix_lm_causal", "j <= i or j < prefix", kPrefix},
     [](Reader& r) { return masks::prefix_lm_causal(r.seqlen, r.integer("prefix", r.seqlen / 2)); },
     [](Draw& d) -> FamilyParameters { return {{"prefix", d.up_to(d.length)}}; }},
    {{"prefix_lm_document", "same document, and j <= i or j in the document's prefix", kPrefixes},
     prefix_lm_document,
     draw_prefix_lm_document},
    {{"qk_sparse", "j <= i, and a key j of a span [b, e) is hidden from rows [j, e)", kSpans},
     qk_sparse,
     draw_qk_sparse},
    {{"hash_sparse", "i and j in the same bucket, and j <= i", kBuckets}, hash_sparse, draw_hash_sparse},
    {{"random_eviction", "j <= i and i < the row that evicts j; from seqlen / 2 on each row evicts one key", kSeed},
     random_eviction,
     [](Draw& d) -> FamilyParameters { return {{"seed", std::to_string(d.own.integer(0, INT64_MAX))}}; }},
    {{"eviction", "j <= i and i < evicted_at[j]", kEviction}, eviction, draw_eviction},
    {{"prefix_tree", "j <= i, and j's node is i's node or an ancestor of it", kTree}, prefix_tree, draw_prefix_tree},
    {{"padding", "j < key_lengths[batch] and i < query_lengths[batch]", kPadding},
     padding,
     [](Draw& d) -> FamilyParameters {
       return {{"key_lengths", d.up_to(d.length)}, {"query_lengths", d.up_to(d.length)}};
     }},
    {{"attention_sink_window", "same document, j <= i, and i - j < window or j among the document's first sink keys",
      kSinks},
     [](Reader& r) {
       return masks::attention_sink_window(r.documents("lengths", r.seqlen), r.integer("sink", 4),
                                           r.integer("window", std::max<int64_t>(r.seqlen / 16, 1)));
     },
     [](Draw& d) -> FamilyParameters {
       return {{"lengths", d.documents()}, {"sink", d.up_to(9)}, {"window", d.window_of(d.length / 2)}};
     }},
    {{"block_causal", "same document, block(j) <= block(i), and block(i) - block(j) < window", kFrames},
     block_causal,
     [](Draw& d) -> FamilyParameters {
       return {{"lengths", d.documents()}, {"blocks", d.documents()}, {"window", d.window_of(4)}};
     }},
    {{"causal_with_blocks", "same document, and j <= i and i - j < window, or j in i's own block", kImages},
     causal_with_blocks,
     draw_causal_with_blocks},
    {{"block_diffusion",
      "same document, and j in the clean copy of an earlier block than i's, or in i's own copy of the same block; "
      "each block's noisy copy lies before its clean one, or all noisy copies before all clean ones",
      kCopies},
     block_diffusion,
     draw_block_diffusion},
    {{"eagle3_ttt",
      "i in the last pass, and j in the first pass, same document and at or before i, or j in a later pass and i's "
      "own token; the rows above the last pass, which make it a square, are empty",
      kPasses},
     eagle3_ttt,
     draw_eagle3_ttt},
    {{"dflash",
      "i in a block, and j in the same block, or j in the context before the block's anchor and in its document; the "
      "rows of the context, which make it a square, are empty",
      kDrafts},
     dflash,
     draw_dflash},
    {{"dilated_window",
      "i and j of equal remainder by dilation, j <= i, and i - j < window; tokens of equal remainder lie side by side",
      kDilated},
     [](Reader& r) {
       return masks::dilated_window(r.seqlen, r.integer("window", std::max<int64_t>(r.seqlen / 16, 1)),
                                    r.integer("dilation", 4))
           .mask;
     },
     [](Draw& d) -> FamilyParameters {
       return {{"window", d.window_of(d.length / 4)}, {"dilation", std::to_string(d.own.integer(1, 9))}};
     }},
    {{"neighborhood_2d",
      "tokens are a grid, row by row, and j is among the kernel_height x kernel_width tokens around i, which are "
      "shifted inwards at the borders",
      kGrid},
     neighborhood_2d,
     draw_neighborhood_2d},
    {{"dilated", "i and j of equal remainder by dilation, and |i - j| < window x dilation, and j <= i if causal",
      kEitherSide},
     [](Reader& r) {
       return masks::dilated(r.seqlen, r.integer("window", std::clamp<int64_t>(r.seqlen / 16, 1, 16)),
                             r.integer("dilation", 4), r.integer("causal", 0) != 0);
     },
     [](Draw& d) -> FamilyParameters {
       return {{"window", d.window_of(d.length / 4)},
               {"dilation", std::to_string(d.own.integer(1, 9))},
               {"causal", d.own.flip() ? "1" : "0"}};
     }},
    {{"bigbird",
      "i or j in the first global_blocks blocks, or their blocks at most window apart, or j's block among the "
      "random_blocks that i's block drew of those that it does not see anyway",
      kRandomBlocks},
     [](Reader& r) {
       return masks::bigbird(r.seqlen, r.integer("block", std::max<int64_t>(r.seqlen / 16, 1)),
                             r.integer("global_blocks", 1), r.integer("window", 1), r.integer("random_blocks", 2),
                             static_cast<uint64_t>(r.integer("seed", r.random.integer(0, INT64_MAX))));
     },
     [](Draw& d) -> FamilyParameters {
       return {{"block", std::to_string(d.own.integer(1, std::max<int64_t>(d.length / 3, 1)))},
               {"global_blocks", d.up_to(2)},
               {"window", d.up_to(3)},
               {"random_blocks", d.up_to(4)},
               {"seed", std::to_string(d.own.integer(0, INT64_MAX))}};
     }},
};

}  // namespace

std::span<const Family> families() {
  static const std::vector<Family> all = [] {
    std::vector<Family> list;
    for (const Entry& entry : kTable) list.push_back(entry.family);
    return list;
  }();
  return all;
}

FamilyParameters draw_family_parameters(std::string_view name, int64_t seqlen, uint64_t common_seed,
                                        uint64_t own_seed) {
  const auto entry =
      std::find_if(std::begin(kTable), std::end(kTable), [&](const Entry& e) { return e.family.name == name; });
  if (entry == std::end(kTable) || !entry->draw) return {};
  Draw draw{seqlen, Random(common_seed), Random(own_seed)};
  return entry->draw(draw);
}

Mask make_family(std::string_view name, int64_t seqlen, const FamilyParameters& parameters, uint64_t seed) {
  const auto join = [](const auto& range) {
    std::string text;
    for (const auto& item : range) text += (text.empty() ? "" : ", ") + std::string(item.name);
    return text.empty() ? std::string("none") : text;
  };
  const auto entry =
      std::find_if(std::begin(kTable), std::end(kTable), [&](const Entry& e) { return e.family.name == name; });
  if (entry == std::end(kTable)) throw_invalid("unknown mask family '", name, "'; known: ", join(families()));
  for (const auto& [key, value] : parameters) {
    const auto known = entry->family.parameters;
    if (std::none_of(known.begin(), known.end(), [&key = key](const FamilyParameter& p) { return p.name == key; })) {
      throw_invalid(name, " has no parameter '", key, "'; known: ", join(known));
    }
  }
  if (seqlen < 0 || seqlen > kMaxSeqlen) throw_invalid("seqlen is ", seqlen, "; it must be between 0 and ", kMaxSeqlen);
  Reader reader(name, seqlen, parameters, seed);
  return entry->build(reader);
}

}  // namespace flashmask
