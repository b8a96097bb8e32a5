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
//   run.minima(count, f)        f.store(lead, power, n, least) for powers 1 and 2: the least f.value(lead, k), an int32
//                               asked for once, of the entries k < count of which the n-th Minima::kRun^power consist
// A run that does the steps in order needs no minima.

#include <type_traits>

#include "mask/families/arguments.h"
#include "mask/families/columns.h"
#include "mask/families/on_host.h"

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

/// Runs of tokens whose numbers go up by `step`.
struct RunsOfTokens {
  Integers tokens;
  int64_t step;
  int32_t* ends;   ///< of each run, then the sequence's end
  int32_t* index;  ///< the run of each token
  /// Of any token but the first.
  FLASHMASK_COLUMN bool begins(const Lead& lead, int64_t n) const {
    // Wraps where a sum would overflow; positions are never that far apart.
    return static_cast<uint64_t>(tokens(lead, n)) - static_cast<uint64_t>(tokens(lead, n - 1)) !=
           static_cast<uint64_t>(step);
  }
};

/// Finds runs of one or two kinds, which 32 bits of a sum each count.
template <int kinds>
struct FindRuns {
  RunsOfTokens of[kinds];
  int64_t seqlen;
  FLASHMASK_COLUMN void prepare(const Lead& lead, int64_t n) const {
    FLASHMASK_UNROLL
    for (int k = 0; k < kinds; ++k) of[k].ends[lead.index * seqlen + n] = static_cast<int32_t>(seqlen);
  }
  FLASHMASK_COLUMN int64_t value(const Lead& lead, int64_t n) const {
    int64_t begins = 0;
    FLASHMASK_UNROLL
    for (int k = 0; k < kinds; ++k) begins |= static_cast<int64_t>(n > 0 && of[k].begins(lead, n)) << (32 * k);
    return begins;
  }
  FLASHMASK_COLUMN void store(const Lead& lead, int64_t n, int64_t begins, int64_t sum) const {
    const int64_t first = lead.index * seqlen;
    FLASHMASK_UNROLL
    for (int k = 0; k < kinds; ++k) {
      const auto run = static_cast<int32_t>(sum >> (32 * k));
      of[k].index[first + n] = run;
      if (begins >> (32 * k) & 1) of[k].ends[first + run - 1] = static_cast<int32_t>(n);
    }
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

/// The parents of a tree's nodes, from the least of which the next node outside of a subtree is found.
struct NoteMinima {
  Minima minima;
  Integers parents;
  int level;       ///< the parents are level 0, from which two more follow, and so on
  int32_t* unfit;  ///< becomes 0; may be null
  FLASHMASK_COLUMN int32_t value(const Lead& lead, int64_t n) const {
    int32_t* const own = minima.entries_of(lead, level);
    if (level == 0) own[n] = static_cast<int32_t>(larger(smaller(parents(lead, n), INT32_MAX), INT32_MIN));
    if (unfit && lead.index == 0 && n == 0) *unfit = 0;
    return own[n];
  }
  FLASHMASK_COLUMN void store(const Lead& lead, int power, int64_t n, int32_t least) const {
    minima.entries_of(lead, level + power)[n] = least;
  }
};

/// Raises `unfit` where nodes do not come in depth-first order: a parent's subtree ends after all of its children.
struct CheckTree {
  Integers parents;
  Minima minima;
  int32_t* unfit;
  FLASHMASK_COLUMN void operator()(const Lead& lead, int64_t n) const {
    const int64_t parent = parents(lead, n);
    const bool is_root = parent == -1, is_earlier = parent >= 0 && parent < n;
    if (is_root || (is_earlier && minima.first_below(lead, static_cast<int32_t>(parent), parent + 1, n) == n)) return;
    *unfit = 1;
  }
};

/// Two steps that do not depend on each other.
template <typename F, typename G>
struct Both {
  F f;
  int64_t count;  ///< of f's entries; g's come after them
  G g;
  FLASHMASK_COLUMN void operator()(const Lead& lead, int64_t n) const {
    if (n < count)
      f(lead, n);
    else
      g(lead, n - count);
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
    Bucket* const runs = table.find(lead, bucket, row);
    if (is_last) Bucket::keep(runs->last, row);
    if (is_first) Bucket::keep(runs->first, row);
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
  VectorOutput out;
  int64_t seqlen_q, seqlen_k;
  FLASHMASK_COLUMN void operator()(const Lead& lead, int64_t j, const Column& column) const {
    const int64_t at = (lead.index * seqlen_k + j) * out.stride;
    if (out.lts) out.lts[at] = row_of(column.lts, seqlen_q);
    if (out.lte) out.lte[at] = row_of(column.lte, seqlen_q);
    if (out.uts) out.uts[at] = row_of(column.uts, seqlen_q);
    if (out.ute) out.ute[at] = row_of(column.ute, seqlen_q);
  }
};

/// Of a tree's columns, whose LTS are written: hides the rows before each key, and counts the keys by where they end.
struct CountEnds {
  VectorOutput out;
  int64_t seqlen;
  int32_t* ends;  ///< [seqlen + 1] for each lead
  FLASHMASK_COLUMN void operator()(const Lead& lead, int64_t j) const {
    const int64_t at = (lead.index * seqlen + j) * out.stride;
    out.ute[at] = static_cast<int32_t>(j);
    if (out.lts[at] > j) add_one(ends + lead.index * (seqlen + 1) + out.lts[at]);  // a token of no node never began
  }
};

/// Positions of a tree's tokens: of the tokens before one it sees those that have not ended, so they count how far it
/// is from the beginning of its tree.
struct PositionsOfTree {
  const int32_t* ends;
  int64_t seqlen;
  int32_t* positions;
  FLASHMASK_COLUMN void prepare(const Lead&, int64_t) const {}
  FLASHMASK_COLUMN int64_t value(const Lead& lead, int64_t n) const { return ends[lead.index * (seqlen + 1) + n]; }
  FLASHMASK_COLUMN void store(const Lead& lead, int64_t n, int64_t, int64_t ended) const {
    positions[lead.index * seqlen + n] = static_cast<int32_t>(n - ended);
  }
};

template <typename Family>
struct WriteColumns {
  Family family;
  Writer write;
  FLASHMASK_COLUMN void operator()(const Lead& lead, int64_t j) const { write(lead, j, family(lead, j)); }
};

/// The columns of causal_with_blocks, a stretch of tokens of one document and one run of ids after the other.
struct WriteCausalWithBlocksInOrder {
  CausalWithBlocks family;
  Writer write;
  void operator()(const Lead& lead, int64_t) const {
    const int64_t tokens = write.seqlen_k;
    for (int64_t begin = 0, end; begin < tokens; begin = end) {
      const Place document = family.documents.place(lead, begin), run = family.runs.place(lead, begin);
      end = document.end > begin ? smaller(run.end, document.end) : run.end;  // there may be tokens past the last one
      if (family.block_ids(lead, begin) >= 0)
        for (int64_t j = begin; j < end; ++j) write(lead, j, family.column(document, run, true, j));
      else
        for (int64_t j = begin; j < end; ++j) write(lead, j, family.column(document, family.alone(j), false, j));
    }
  }
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

template <typename Run>
Integers ends_of_runs_in_order(Run& run, const Integers& entries, int64_t step) {
  int32_t* const ends = run.template array<int32_t>(entries.count);
  run.each(1, EndsOfRunsInOrder{entries, step, ends});
  return integers_of(ends, run.leads(), entries.count);
}

/// Those whose ends a scan is to find.
template <typename Run>
RunsOfTokens runs_to_find(Run& run, const Integers& tokens, int64_t step) {
  return {tokens, step, run.template array<int32_t>(tokens.count), run.template array<int32_t>(tokens.count)};
}

inline Segments segments_of(const RunsOfTokens& found, const Leads& leads) {
  const int64_t seqlen = found.tokens.count;
  return Segments(integers_of(found.ends, leads, seqlen), seqlen - 1, found.index);
}

/// The runs of tokens whose numbers go up by `step`.
template <typename Run>
Segments runs(Run& run, const Integers& tokens, int64_t step) {
  if constexpr (Run::kInOrder) {
    return Segments(ends_of_runs_in_order(run, tokens, step), tokens.count - 1);
  } else {
    const RunsOfTokens own = runs_to_find(run, tokens, step);
    run.scan(tokens.count, FindRuns<1>{{own}, tokens.count});
    return segments_of(own, run.leads());
  }
}

template <typename Run>
Segments segments(Run& run, const GivenSegments& given, int64_t seqlen) {
  const Leads leads = run.leads();
  switch (given.form) {
    case Form::kNone:  // one of all tokens
      return Segments({.count = 1, .constant = seqlen});
    case Form::kCuSeqlens:
      return Segments(given.values.from(1));
    case Form::kSeqlens: {
      int64_t* ends = run.template array<int64_t>(given.values.count);
      run.scan(given.values.count, EndsOfLengths{given.values, ends});
      return Segments(integers_of(ends, leads, given.values.count));
    }
    default:
      return runs(run, given.values, step_of(given.form));
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

/// The parents' minima; the first step also clears the flag of a tree that does not fit.
template <typename Run>
Minima minima(Run& run, const Integers& parents, int32_t* unfit) {
  Minima all(parents.count);
  all.memory = run.template array<int32_t>(all.words);
  for (int level = 0; level + 1 < all.levels; level += 2)
    run.minima(all.count_of(level), NoteMinima{all, parents, level, level == 0 ? unfit : nullptr});
  return all;
}

/// f(family) for the tree, of which next(lead, node) is the first node after a node's subtree.
template <typename Run, typename Next, typename F>
void with_tree(Run& run, const Arguments& a, const Next& next, const F& f) {
  if (a.documents.values.data)
    f(PrefixTree<Next>{segments(run, a.documents, a.seqlen), next});
  else  // all lengths are 1
    f(TokenTree<Next>{a.parents.count, next});
}

template <typename Run>
void prefix_tree(Run& run, const Arguments& a, const Writer& write) {
  const int64_t nodes = a.parents.count, columns = a.shape.seqlen_k;
  if constexpr (Run::kInOrder) {
    int32_t* const first_child = run.template zeros<int32_t>(nodes + 1);
    int32_t* const next = run.template array<int32_t>(nodes + 1);
    run.each(1, NextOutsideInOrder{a.parents, first_child, next, a.unfit});
    with_tree(run, a, integers_of(next, run.leads(), nodes + 1).from(1), [&](const auto& family) {
      run.each(columns, WriteColumns<std::decay_t<decltype(family)>>{family, write});
    });
  } else {
    const Minima parents = minima(run, a.parents, a.unfit);
    with_tree(run, a, NextOutside{parents}, [&](const auto& family) {
      const WriteColumns<std::decay_t<decltype(family)>> step{family, write};
      if (a.unfit)
        run.each(columns + nodes,
                 Both<std::decay_t<decltype(step)>, CheckTree>{step, columns, {a.parents, parents, a.unfit}});
      else
        run.each(columns, step);
    });
  }
}

template <typename Run>
HashSparse hash_sparse(Run& run, const Arguments& a) {
  const int64_t rows = a.shape.seqlen_q;
  BucketTable table{a.query_buckets, rows, nullptr};
  if constexpr (Run::kInOrder) {
    const Integers ends = ends_of_runs_in_order(run, a.query_buckets, 0);
    int64_t most = 0;
    for (int64_t n = 0; n < run.leads().count(); ++n) most = larger(most, count_runs(ends, run.leads()[n]));
    table.most = larger(most, 64);  // few buckets do not collide then
    table.memory = run.template zeros<Bucket>(BucketTable::size(table.most));
    run.each(1, NoteRunsInOrder{table, ends});
  } else {
    table.memory = run.template zeros<Bucket>(BucketTable::size(rows));
    run.each(rows, NoteRuns{table});
  }
  return {rows, a.shape.seqlen_k, a.shape.band == Band::causal(), a.key_buckets, table, a.unfit};
}

template <typename Run>
Blocks blocks(Run& run, const Arguments& a) {
  if (a.block > 0) return {a.block, Segments({})};
  return {0, segments(run, a.blocks, a.seqlen)};
}

template <typename Run>
CausalWithBlocks causal_with_blocks(Run& run, const Arguments& a, int64_t reach) {
  if constexpr (!Run::kInOrder) {
    if (are_of_tokens(a.documents.form)) {  // both in one scan
      const RunsOfTokens documents = runs_to_find(run, a.documents.values, step_of(a.documents.form));
      const RunsOfTokens blocks = runs_to_find(run, a.block_ids, 0);
      run.scan(a.seqlen, FindRuns<2>{{documents, blocks}, a.seqlen});
      return {segments_of(documents, run.leads()), segments_of(blocks, run.leads()), a.block_ids, reach};
    }
  }
  const Segments documents = segments(run, a.documents, a.seqlen);
  return {documents, runs(run, a.block_ids, 0), a.block_ids, reach};
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
void build_columns(Run& run, const Arguments& a, const VectorOutput& vectors) {
  const Writer write{vectors, a.shape.seqlen_q, a.shape.seqlen_k};
  const auto columns = [&](const auto& family) {
    run.each(a.shape.seqlen_k, WriteColumns<std::decay_t<decltype(family)>>{family, write});
  };
  const auto documents = [&] { return segments(run, a.documents, a.seqlen); };
  const int64_t reach = a.window == -1 ? kFarthest : smaller(a.window, kFarthest);
  const bool is_cleared_later = !Run::kInOrder && a.kind == Kind::kPrefixTree && a.parents.count > 0;
  if (a.unfit && !is_cleared_later) run.each(1, ClearFlag{a.unfit});
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
      if constexpr (Run::kInOrder) {
        const HashSparse family = hash_sparse(run, a);
        return columns(HashSparseInOrder{
            family, run.template zeros<HashSparseInOrder::Known>(BucketTable::size(family.rows.most))});
      } else {
        return columns(hash_sparse(run, a));
      }
    case Kind::kPrefixTree:
      return prefix_tree(run, a, write);
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
      if constexpr (Run::kInOrder)
        return run.each(1, WriteCausalWithBlocksInOrder{causal_with_blocks(run, a, reach), write});
      else
        return columns(causal_with_blocks(run, a, reach));
    case Kind::kBlockDiffusion:
      return block_diffusion(run, a, write);
    case Kind::kEagle3Ttt:
      return columns(Eagle3Ttt{documents(), a.seqlen});
    case Kind::kDflash:
      return columns(Dflash{documents(), a.anchors, a.seqlen, a.block, {}, {}});
  }
}

/// After a tree's columns: its positions.
template <typename Run>
void positions_of_tree(Run& run, const Arguments& a, const Output& output) {
  const int64_t seqlen = a.shape.seqlen_k;
  int32_t* const ends = run.template zeros<int32_t>(seqlen + 1);
  run.each(seqlen, CountEnds{output.vectors, seqlen, ends});
  run.scan(seqlen, PositionsOfTree{ends, seqlen, output.positions});
}

/// All columns of a mask of the arguments, and its positions if it has any.
template <typename Run>
void build(Run& run, const Arguments& a, const Output& output) {
  build_columns(run, a, output.vectors);
  if (a.shape.has_positions) positions_of_tree(run, a, output);
}

}  // namespace flashmask::build
