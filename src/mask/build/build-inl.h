// SPDX-License-Identifier: Apache-2.0
#pragma once

// How each family is built, for any Run, which does the steps on the host or a device (or only adds up memory):
//   Run::kInOrder               whether one entry is done after the other
//   run.leads()                 Leads: batch entries and heads
//   run.array<T>(count)         scratch of `count` elements for each lead, as a T*; contents undefined
//   run.zeros<T>(count)         the same; contents 0
//   run.each(count, f)          f(lead, n) for each lead and n < count
//   run.scan(count, f)          f.prepare(lead, n) likewise, and after all of them f.store(lead, n, value, sum):
//                               f.value(lead, n), which may be asked for more than once, and the sum of those up to it

#include <type_traits>

#include "mask/build/arguments.h"
#include "mask/build/columns.h"

namespace flashmask::build {

/// Scratch of `count` elements for each lead.
template <typename T>
Integers integers_of(const T* data, const Leads& leads, int64_t count) {
  static_assert(std::is_same_v<T, int32_t> || std::is_same_v<T, int64_t>);
  return {data, std::is_same_v<T, int32_t> ? DataType::kInt32 : DataType::kInt64, count, leads.heads * count, count, 1};
}

FLASHMASK_COLUMN int32_t row_of(int64_t value, int64_t seqlen_q) {
  return static_cast<int32_t>(larger(0, smaller(value, seqlen_q)));
}

// --- Steps ----------------------------------------------------------------------------------------

/// Ends of segments from their lengths.
struct EndsOfLengths {
  Integers lengths;
  int64_t* ends;
  FLASHMASK_COLUMN void prepare(const Lead&, int64_t) const {}
  FLASHMASK_COLUMN int64_t value(const Lead& lead, int64_t n) const { return lengths(lead, n); }
  FLASHMASK_COLUMN void store(const Lead& lead, int64_t n, int64_t, int64_t sum) const {
    ends[lead.index * lengths.count + n] = sum;
  }
};

/// Ends of segments from the tokens at which they begin, then the sequence's end. Begins(lead, token) is asked for
/// every token but the first.
template <typename Begins>
struct EndsOfRuns {
  Begins begins;
  int64_t seqlen;
  int32_t* ends;
  FLASHMASK_COLUMN void prepare(const Lead& lead, int64_t n) const {
    ends[lead.index * seqlen + n] = static_cast<int32_t>(seqlen);
  }
  FLASHMASK_COLUMN int64_t value(const Lead& lead, int64_t n) const { return n > 0 && begins(lead, n); }
  FLASHMASK_COLUMN void store(const Lead& lead, int64_t n, int64_t is_begin, int64_t segment) const {
    if (is_begin) ends[lead.index * seqlen + segment - 1] = static_cast<int32_t>(n);
  }
};

struct BeginsOfTokens {
  Integers tokens;
  int64_t step;  ///< from one token of a document to the next
  FLASHMASK_COLUMN bool operator()(const Lead& lead, int64_t n) const {
    // Wraps where a sum would overflow; positions are never that far apart.
    return static_cast<uint64_t>(tokens(lead, n)) - static_cast<uint64_t>(tokens(lead, n - 1)) !=
           static_cast<uint64_t>(step);
  }
};

struct BeginsOfBlocks {
  Segments documents;
  Integers block_ids;
  FLASHMASK_COLUMN bool operator()(const Lead& lead, int64_t n) const {
    return block_ids(lead, n) != block_ids(lead, n - 1) || documents.place(lead, n).begin == n;
  }
};

/// Numbers the groups of shared questions and finds where they end, the last with the segments.
struct GroupsOfSegments {
  Segments segments;
  Integers is_question;
  int32_t *group, *group_end;
  FLASHMASK_COLUMN void prepare(const Lead& lead, int64_t n) const {
    group_end[lead.index * segments.count() + n] = static_cast<int32_t>(segments.total(lead));
  }
  FLASHMASK_COLUMN int64_t value(const Lead& lead, int64_t n) const { return is_question(lead, n) != 0; }
  FLASHMASK_COLUMN void store(const Lead& lead, int64_t n, int64_t is_begin, int64_t number) const {
    const int64_t first = lead.index * segments.count();
    group[first + n] = static_cast<int32_t>(number);
    if (number > 1 && is_begin) group_end[first + number - 2] = static_cast<int32_t>(segments.end_of_first(lead, n));
  }
};

/// The smallest of each run of values.
struct Smallest {
  Integers values;
  int32_t* out;
  int64_t out_count;
  FLASHMASK_COLUMN void operator()(const Lead& lead, int64_t n) const {
    const int64_t least = with_run(values, lead, n, [](const auto& value) {
      auto found = value(0);
      FLASHMASK_UNROLL
      for (int k = 1; k < kRun; ++k) found = value(k) < found ? value(k) : found;
      return static_cast<int64_t>(found);
    });
    out[lead.index * out_count + n] = static_cast<int32_t>(larger(smaller(least, INT32_MAX), INT32_MIN));
  }
};

/// In depth-first order a node's subtree ends before the first later node whose parent is an earlier one than the node.
/// It is searched with the smallest parents of ever longer runs.
struct LastDescendant {
  static constexpr int kLevels = 7;  // 32 to the 7th is more than there are nodes
  Integers parents[kLevels];         ///< [0] the parents, [n + 1] the smallest of each run of [n]
  int levels;
  int32_t* out;
  FLASHMASK_COLUMN void operator()(const Lead& lead, int64_t node) const {
    out[lead.index * parents[0].count + node] = static_cast<int32_t>(next_outside(lead, node) - 1);
  }

 private:
  FLASHMASK_COLUMN int64_t next_outside(const Lead& lead, int64_t node) const {
    int64_t from = node + 1;
    for (int level = 0; level < levels && from < parents[level].count;) {
      const int64_t found = first_below(parents[level], lead, from, node);
      if (found >= 0 && level == 0) return found;
      from = found >= 0 ? found * kRun : from / kRun + 1;
      level += found >= 0 ? -1 : 1;
    }
    return parents[0].count;
  }
  /// The first entry less than `node` from `from` to the end of its run; -1: there is none.
  FLASHMASK_COLUMN static int64_t first_below(const Integers& x, const Lead& lead, int64_t from, int64_t node) {
    const int64_t run = from / kRun;
    const int skipped = static_cast<int>(from - run * kRun);
    return with_run(x, lead, run, [&](const auto& entry) {
      int first = kRun;
      FLASHMASK_UNROLL
      for (int k = kRun - 1; k >= 0; --k) {
        if (entry(k) < static_cast<decltype(entry(k))>(node) && k >= skipped) first = k;
      }
      return first < kRun ? run * kRun + first : int64_t{-1};
    });
  }
};

/// The same from the last node to the first: after a node's last child comes what follows the node.
struct LastDescendantBackward {
  Integers parents;
  int32_t* out;
  FLASHMASK_COLUMN void operator()(const Lead& lead, int64_t after) const {
    const int64_t node = parents.count - 1 - after;
    int32_t* const last = out + lead.index * parents.count;
    int64_t next = node + 1;
    while (next < parents.count && parents(lead, next) >= node) next = last[next] + 1;
    last[node] = static_cast<int32_t>(next - 1);
  }
};

/// Raises `unfit` where nodes do not come in depth-first order.
struct CheckTree {
  Integers parents, last_descendant;
  int32_t* unfit;
  FLASHMASK_COLUMN void operator()(const Lead& lead, int64_t n) const {
    const int64_t parent = parents(lead, n);
    const bool in_order = parent == -1 || (parent >= 0 && parent < n && last_descendant(lead, parent) >= n);
    if (!in_order) *unfit = 1;
  }
};

/// Notes where runs of rows of one bucket begin and end. The last rows come first, after which few are kept.
struct NoteRuns {
  BucketTable table;
  FLASHMASK_COLUMN void operator()(const Lead& lead, int64_t after) const {
    const Integers& buckets = table.buckets;
    const int64_t row = buckets.count - 1 - after, bucket = buckets(lead, row);
    const bool is_first = row == 0 || buckets(lead, row - 1) != bucket;
    const bool is_last = after == 0 || buckets(lead, row + 1) != bucket;
    if (!is_first && !is_last) return;
    LastRuns* const runs = table.find(lead, bucket, row);
    if (is_last) LastRuns::keep(runs->last, row);
    if (is_first) LastRuns::keep(runs->first, row);
  }
};

struct ClearFlag {
  int32_t* flag;
  FLASHMASK_COLUMN void operator()(const Lead& lead, int64_t) const {
    if (lead.index == 0) *flag = 0;
  }
};

/// Writes columns, clamped to the rows.
struct Writer {
  Output out;
  int64_t seqlen_q, seqlen_k;
  FLASHMASK_COLUMN void operator()(const Lead& lead, int64_t j, const Column& column) const {
    const int64_t at = (lead.index * seqlen_k + j) * out.stride;
    if (out.lts) out.lts[at] = row_of(column.lts, seqlen_q);
    if (out.lte) out.lte[at] = row_of(column.lte, seqlen_q);
    if (out.uts) out.uts[at] = row_of(column.uts, seqlen_q);
    if (out.ute) out.ute[at] = row_of(column.ute, seqlen_q);
  }
};

template <typename Family>
struct WriteColumns {
  Family family;
  Writer write;
  FLASHMASK_COLUMN void operator()(const Lead& lead, int64_t j) const { write(lead, j, family(lead, j)); }
};

/// Both columns of a token in the order of block diffusion in which each block's noisy copy and then its clean one lie.
/// What is hidden comes last.
struct WriteInterleaved {
  DiffusionBlocks blocks;
  Writer write;
  int64_t* order;
  FLASHMASK_COLUMN void operator()(const Lead& lead, int64_t token) const {
    const DiffusionBlock own = blocks(lead, token);
    const int64_t total = blocks.seqlen;
    const int64_t noisy = token + (own.visible ? own.begin : blocks.visible(lead));
    const int64_t clean = token + (own.visible ? own.end : total);
    if (noisy < 0 || clean < 0 || noisy >= 2 * total || clean >= 2 * total)
      return;  // of contents that are no documents
    write(lead, noisy, own.visible ? seen_by(2 * own.begin, own.begin + own.end) : seen_by(0, 0));
    write(lead, clean, own.visible ? seen_by(own.begin + own.end, 2 * own.until) : seen_by(0, 0));
    if (!order) return;
    order[lead.index * 2 * total + noisy] = token;
    order[lead.index * 2 * total + clean] = total + token;
  }
};

/// The same of all noisy copies and then all clean ones. A clean key is seen by noisy rows of later blocks and by clean
/// rows from its own on, which are one run of rows only if there are no later blocks; if nothing follows the document,
/// what is hidden from is two.
struct WriteConcatenated {
  DiffusionBlocks blocks;
  Writer write;
  int64_t* order;
  int32_t* unfit;
  FLASHMASK_COLUMN void operator()(const Lead& lead, int64_t token) const {
    const DiffusionBlock own = blocks(lead, token);
    const int64_t total = blocks.seqlen;
    const bool is_last = own.end == own.until;
    if (unfit && !blocks.fits_concatenated(own)) *unfit = 1;
    const Column hidden{.lts = 0, .lte = kToEnd, .uts = 0, .ute = is_last ? total + own.begin : own.end};
    Column noisy{.lts = own.end, .ute = own.begin}, clean = hidden;
    if (own.visible) {
      clean.lts = is_last ? total + own.until : own.until;
      clean.lte = is_last ? kToEnd : total + own.begin;
    } else {
      noisy.lts = 0;
    }
    write(lead, token, noisy);
    write(lead, total + token, clean);
    if (!order) return;
    order[lead.index * 2 * total + token] = token;
    order[lead.index * 2 * total + total + token] = total + token;
  }
};

// --- Families -------------------------------------------------------------------------------------

/// The segments that begin at token 0 and where `begins` says so.
template <typename Run, typename Begins>
Segments runs(Run& run, const Begins& begins, int64_t seqlen) {
  int32_t* ends = run.template array<int32_t>(seqlen);
  run.scan(seqlen, EndsOfRuns<Begins>{begins, seqlen, ends});
  return Segments(integers_of(ends, run.leads(), seqlen), seqlen - 1);
}

template <typename Run>
Segments segments(Run& run, const GivenSegments& given, int64_t seqlen) {
  const Leads leads = run.leads();
  switch (given.form) {
    case Form::kNone:  // one of all tokens
      return Segments({.count = 1, .constant = seqlen});
    case Form::kCuSeqlens: {
      Integers ends = given.values;
      const int64_t bytes = static_cast<int64_t>(element_size(ends.dtype));
      ends.data = static_cast<const char*>(ends.data) + ends.stride * bytes;
      ends.count -= 1;
      return Segments(ends);
    }
    case Form::kSeqlens: {
      int64_t* ends = run.template array<int64_t>(given.values.count);
      run.scan(given.values.count, EndsOfLengths{given.values, ends});
      return Segments(integers_of(ends, leads, given.values.count));
    }
    default:
      return runs(run, BeginsOfTokens{given.values, given.form == Form::kPositionIds ? 1 : 0}, seqlen);
  }
}

template <typename Run>
SharedQuestion shared_question(Run& run, const Arguments& a) {
  const Segments all = segments(run, a.documents, a.seqlen);
  int32_t* group = run.template array<int32_t>(all.count());
  int32_t* group_end = run.template array<int32_t>(all.count());
  run.scan(all.count(), GroupsOfSegments{all, a.is_question, group, group_end});
  return {all, a.is_question, integers_of(group, run.leads(), all.count()),
          integers_of(group_end, run.leads(), all.count())};
}

template <typename Run>
Integers last_descendants(Run& run, const Integers& parents) {
  if constexpr (Run::kInOrder) {
    int32_t* const last = run.template array<int32_t>(parents.count);
    run.each(parents.count, LastDescendantBackward{parents, last});
    return integers_of(last, run.leads(), parents.count);
  }
  LastDescendant step{.parents = {parents}, .levels = 1, .out = run.template array<int32_t>(parents.count)};
  for (; step.parents[step.levels - 1].count > kRun; ++step.levels) {
    const Integers& below = step.parents[step.levels - 1];
    const int64_t count = (below.count + kRun - 1) / kRun;
    int32_t* smallest = run.template array<int32_t>(count);
    run.each(count, Smallest{below, smallest, count});
    step.parents[step.levels] = integers_of(smallest, run.leads(), count);
  }
  run.each(parents.count, step);
  return integers_of(step.out, run.leads(), parents.count);
}

template <typename Run>
PrefixTree prefix_tree(Run& run, const Arguments& a) {
  const Integers last = last_descendants(run, a.parents);
  if (a.unfit) run.each(a.parents.count, CheckTree{a.parents, last, a.unfit});
  return {segments(run, a.documents, a.seqlen), last};
}

template <typename Run>
HashSparse hash_sparse(Run& run, const Arguments& a) {
  const int64_t rows = a.shape.seqlen_q;
  const BucketTable table{a.query_buckets, run.template zeros<int32_t>(BucketTable::words(rows))};
  run.each(rows, NoteRuns{table});
  return {rows, a.shape.seqlen_k, a.shape.band == Band::causal(), a.key_buckets, table, a.unfit};
}

template <typename Run>
Blocks blocks(Run& run, const Arguments& a) {
  if (a.block > 0) return {a.block, Segments({})};
  return {0, segments(run, a.blocks, a.seqlen)};
}

template <typename Run>
CausalWithBlocks causal_with_blocks(Run& run, const Arguments& a, int64_t reach) {
  const Segments documents = segments(run, a.documents, a.seqlen);
  return {documents, runs(run, BeginsOfBlocks{documents, a.block_ids}, a.seqlen), a.block_ids, reach};
}

template <typename Run>
DiffusionBlocks diffusion_blocks(Run& run, const Arguments& a) {
  const Segments documents = segments(run, a.documents, a.seqlen);
  return {documents, blocks(run, a), a.seqlen};
}

template <typename Run>
void block_diffusion(Run& run, const Arguments& a, const Writer& write) {
  const DiffusionBlocks own = diffusion_blocks(run, a);
  if (a.concatenated)
    run.each(a.seqlen, WriteConcatenated{own, write, a.order, a.unfit});
  else
    run.each(a.seqlen, WriteInterleaved{own, write, a.order});
}

/// All columns of a mask of the arguments.
template <typename Run>
void build(Run& run, const Arguments& a, const Output& output) {
  const Writer write{output, a.shape.seqlen_q, a.shape.seqlen_k};
  const auto columns = [&](const auto& family) {
    run.each(a.shape.seqlen_k, WriteColumns<std::decay_t<decltype(family)>>{family, write});
  };
  const auto documents = [&] { return segments(run, a.documents, a.seqlen); };
  const int64_t reach = a.window == -1 ? kFarthest : smaller(a.window, kFarthest);
  if (a.unfit) run.each(1, ClearFlag{a.unfit});
  switch (a.kind) {
    case Kind::kFull:
    case Kind::kCausal:
    case Kind::kSlidingWindow:
      return;
    case Kind::kCausalDocument:
      return columns(CausalDocument{documents()});
    case Kind::kDocument:
      return columns(Document{documents()});
    case Kind::kPrefixLmDocument:
      return columns(PrefixLmDocument{documents(), a.prefix});
    case Kind::kCausalBlockwise:
      return columns(CausalBlockwise{documents()});
    case Kind::kSharedQuestion:
      return columns(shared_question(run, a));
    case Kind::kGlobalSlidingWindow:
      return columns(GlobalSlidingWindow{a.shape.seqlen_k, a.global_tokens, a.window});
    case Kind::kPrefixLmCausal:
      return columns(PrefixLmCausal{a.prefix});
    case Kind::kQkSparse:
      return columns(QkSparse{a.span_begin, a.span_end, {}});
    case Kind::kEviction:
      return columns(Eviction{a.evicted_at});
    case Kind::kHashSparse:
      return columns(hash_sparse(run, a));
    case Kind::kPrefixTree:
      return columns(prefix_tree(run, a));
    case Kind::kPrefixTreeFromIntervals:
      return columns(PrefixTreeFromIntervals{a.tin, a.tout, {}});
    case Kind::kPadding:
      return columns(Padding{a.key_lengths, a.query_lengths});
    case Kind::kAttentionSinkWindow:
      return columns(AttentionSinkWindow{documents(), a.sink, reach});
    case Kind::kBlockCausal: {
      const Segments of = documents();
      return columns(BlockCausal{of, blocks(run, a), reach});
    }
    case Kind::kCausalWithBlocks:
      return columns(causal_with_blocks(run, a, reach));
    case Kind::kBlockDiffusion:
      return block_diffusion(run, a, write);
    case Kind::kEagle3Ttt:
      return columns(Eagle3Ttt{documents(), a.seqlen});
    case Kind::kDflash:
      return columns(Dflash{documents(), a.anchors, a.seqlen, a.block, {}, {}});
  }
}

}  // namespace flashmask::build
