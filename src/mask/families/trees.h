// SPDX-License-Identifier: Apache-2.0
#pragma once

// Packed prefix trees.

#include <algorithm>
#include <vector>

#include "common/message.h"
#include "mask/families/contents.h"
#include "mask/families/minima.h"
#include "mask/families/steps.h"

namespace flashmask::build {

/// Notes the least of the parents of a tree's nodes, to find the next node outside of a subtree.
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

/// The first node after each node's subtree: its next sibling, or else the first node after its parent's.
struct NextOutsideInOrder {
  Integers parents;
  int32_t* first_child;  ///< parents.count + 1 zeros for each lead: of the roots, then of each node; 0: none so far
  int32_t* next;         ///< parents.count + 1 for each lead: after the roots, then after each node
  int32_t* unfit;        ///< raised where nodes do not come in depth-first order
  void operator()(const Lead& lead, int64_t) const {
    with_entries(parents, lead, [&](const auto& parent) {
      const int64_t first = lead.index * (parents.count + 1);
      const bool fits =
          note_siblings(parent, first_child + first, next + first + 1) && follow_parents(parent, next + first + 1);
      if (!fits) *unfit = 1;
    });
  }

 private:
  // Without branches: in any tree neighbouring nodes may be in any relation.
  template <typename Parent>
  bool note_siblings(const Parent& parent, int32_t* child, int32_t* sibling) const {
    bool are_earlier = true;
    for (int64_t node = parents.count - 1; node >= 0; --node) {
      const int64_t above = parent(node);
      const bool is_earlier = above >= -1 && above < node;
      are_earlier &= is_earlier;
      int32_t& latest = child[is_earlier ? above + 1 : 0];
      sibling[node] = latest;
      latest = static_cast<int32_t>(node);
    }
    return are_earlier;
  }
  /// Each node must be the first child of the one before it, or come next after its subtree.
  template <typename Parent>
  bool follow_parents(const Parent& parent, int32_t* own) const {
    bool are_in_order = true;
    own[-1] = static_cast<int32_t>(parents.count);
    for (int64_t node = 0; node < parents.count; ++node) {
      const int64_t above = parent(node);
      are_in_order &= (above == node - 1) | (own[node - 1] == node);
      const int32_t sibling = own[node], after_parent = own[above];
      own[node] = sibling > 0 ? sibling : after_parent;
    }
    return are_in_order;
  }
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

/// A tree whose nodes are several tokens each.
template <typename Next>
struct NodeTree {
  Segments nodes;
  Next next;
  FLASHMASK_COLUMN Column operator()(const Lead& lead, int64_t j) const {
    const Place node = nodes.place(lead, j);
    if (node.index >= nodes.count()) return {.lts = node.end};
    // Neighbouring tokens mostly share a node.
    if (lead.index != found.lead || node.index != found.node)
      found = {lead.index, node.index, nodes.end_after(lead, next(lead, node.index))};
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

/// Hides the rows before each key of a tree, whose LTS are already written, and counts the keys by their ends.
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

/// Positions of a tree's tokens: a token sees the tokens before it that have not ended, so their number is its distance
/// from the beginning of its tree.
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

/// A tree, causal or with a window over its positions.
template <typename Own>
struct OfTree : OfColumns<Own> {
  /// With the length of the sequence set.
  static void measure(Arguments& a) {
    OfColumns<Own>::measure(a);
    if (a.shape.form.has_positions && a.shape.heads > 1)
      throw_invalid("window is ", a.number("window"), " and the tree has ", a.shape.heads,
                    " heads; positions are those of all heads, so with a window it must have 1");
  }
  template <typename Run>
  static void write(Run& run, const Arguments& a, const Output& output) {
    Own::write_tree(run, a, output);
    if (!a.shape.form.has_positions) return;
    const int64_t seqlen = a.shape.seqlen_k;
    int32_t* const ends = run.template zeros<int32_t>(seqlen + 1);
    run.each(seqlen, CountEnds{output.vectors, seqlen, ends});
    run.scan(seqlen, PositionsOfTree{ends, seqlen, output.positions});
  }
};

struct PrefixTree : OfTree<PrefixTree> {
  static constexpr Declared kParameters[] = {
      {"parents", Kind::kVector, "of each node, in depth-first order; -1 is a root"},
      {.name = "lengths", .kind = Kind::kVector, .doc = "tokens of each node; 1 if left out", .is_optional = true},
      kOptionalSeqlen,
      kWindow};
  static constexpr std::string_view kMisfit =
      "nodes must come in depth-first order, so that each subtree is contiguous";
  static constexpr Family kFamily{"prefix_tree",
                                  kParameters,
                                  {kLts, Edges::kCausal, false, kMisfit},
                                  "window",
                                  {kLts | kUte, Edges::kReach, true, kMisfit}};

  static void measure(Arguments& a) {
    const int64_t nodes = a.vector("parents").count;
    const Value& lengths = a["lengths"];
    a.documents = {SegmentForm::kSeqlens, "lengths",
                   lengths.is_given ? lengths.vector : Integers{.count = nodes, .constant = 1}};
    expect_count("lengths", a.documents.values, nodes, "nodes");
    a.seqlen = tokens_of(a.documents, a.optional_number("seqlen"), a.leads(), a.device);
    OfTree::measure(a);
  }

  template <typename Run>
  static bool clears_flag(const Arguments& a) {
    return !Run::kInOrder && a.vector("parents").count > 0;
  }
  template <typename Run>
  static void write_tree(Run& run, const Arguments& a, const Output& output) {
    const Integers& parents = a.vector("parents");
    const int64_t nodes = parents.count, columns = a.shape.seqlen_k;
    if constexpr (Run::kInOrder) {
      int32_t* const first_child = run.template zeros<int32_t>(nodes + 1);
      int32_t* const next = run.template array<int32_t>(nodes + 1);
      run.each(1, NextOutsideInOrder{parents, first_child, next, a.unfit});
      with_tree(run, a, integers_of(next, run.leads(), nodes + 1).from(1),
                [&](const auto& tree) { write_columns(run, a, output, tree); });
    } else {
      const Minima least = minima(run, parents, a.unfit);
      with_tree(run, a, NextOutside{least}, [&](const auto& tree) {
        const WriteColumns<std::decay_t<decltype(tree)>> step{tree, writer_of(a, output)};
        if (a.unfit)
          run.each(columns + nodes,
                   IndependentSteps<std::decay_t<decltype(step)>, CheckTree>{step, columns, {parents, least, a.unfit}});
        else
          run.each(columns, step);
      });
    }
  }

  /// Names the first node that does not come in depth-first order.
  template <typename Run>
  static void throw_first_misfit(Run& run, const Arguments& a) {
    const Leads& leads = run.leads();
    const Integers& parents = a.vector("parents");
    each_lead(leads, [&](const Lead& lead) {
      for (int64_t n = 0; n < parents.count; ++n) {
        const int64_t parent = parents(lead, n);
        if (parent < -1 || parent >= n)
          throw_invalid("parents", at(leads, lead, n), " is ", parent,
                        "; a parent must be -1 (a root) or an earlier node");
        int64_t open = n - 1;  // the subtrees that end before the node, from the innermost on
        while (open >= 0 && open != parent) open = parents(lead, open);
        if (open != parent)
          throw_invalid("node ", n, " with parent ", parent,
                        " breaks the depth-first order: the parent's subtree ended before it");
      }
    });
  }

 private:
  /// The parents' minima; the first step also clears the flag of a tree that does not fit.
  template <typename Run>
  static Minima minima(Run& run, const Integers& parents, int32_t* unfit) {
    Minima all(parents.count);
    all.memory = run.template array<int32_t>(all.words);
    for (int level = 0; level + 1 < all.levels; level += 2)
      run.minima(all.count_of(level), NoteMinima{all, parents, level, level == 0 ? unfit : nullptr});
    return all;
  }

  /// Calls f(family) for the tree; next(lead, node) is the first node after a node's subtree.
  template <typename Run, typename Next, typename F>
  static void with_tree(Run& run, const Arguments& a, const Next& next, const F& f) {
    if (a.documents.values.data)
      f(NodeTree<Next>{segments(run, a.documents, a.seqlen), next});
    else  // all lengths are 1
      f(TokenTree<Next>{a.vector("parents").count, next});
  }
};

struct PrefixTreeFromIntervals : OfTree<PrefixTreeFromIntervals> {
  static constexpr Declared kParameters[] = {{"tin", Kind::kVector, "where each node's own tokens begin"},
                                             {"tout", Kind::kVector, "where its subtree ends"},
                                             kOptionalSeqlen,
                                             kWindow};
  static constexpr Family kFamily{
      "prefix_tree_from_intervals", kParameters, {kLts, Edges::kCausal}, "window", {kLts | kUte, Edges::kReach, true}};

  static void measure(Arguments& a) {
    const Integers &tin = a.vector("tin"), &tout = a.vector("tout");
    if (tin.count != tout.count)
      throw_invalid("tin has ", tin.count, " entries and tout ", tout.count, "; they must be equal");
    const std::optional<int64_t> seqlen = a.optional_number("seqlen");
    a.seqlen = seqlen ? *seqlen : largest("tout", tout, a.leads(), a.device);
    OfTree::measure(a);
  }
  static void check(const Arguments& a, const Leads& leads) {
    const Integers &begins = a.vector("tin"), &ends = a.vector("tout");
    each_lead(leads, [&](const Lead& lead) {
      std::vector<int64_t> open;  // ends of the subtrees around the current node
      int64_t written = 0;        // tokens that have their node
      const auto close = [&] {
        while (!open.empty() && open.back() == written) open.pop_back();
      };
      for (int64_t n = 0; n < begins.count; ++n) {
        close();
        const int64_t tin = begins(lead, n), tout = ends(lead, n), around = open.empty() ? a.seqlen : open.back();
        if (tin != written || tout < tin || tout > around)
          throw_invalid("node ", n, " has the interval [", tin, ", ", tout, "); in depth-first order it must begin at ",
                        written, " and end in [", written, ", ", around, "], inside of its parent's");
        const bool has_child = n + 1 < begins.count && begins(lead, n + 1) < tout;
        written = has_child ? std::max(begins(lead, n + 1), tin) : tout;
        open.push_back(tout);
      }
      close();
      if (!open.empty())
        throw_invalid("a node's interval ends at ", open.back(), ", but its last child ends at ", written,
                      "; a node's own tokens come before its children");
    });
  }

  struct Columns {
    Integers tin, tout;
    Search search;
    FLASHMASK_COLUMN Column operator()(const Lead& lead, int64_t j) const {
      const int64_t nodes = search(tin, lead, tin.count, j);  // nodes that begin at or before the token
      return {.lts = nodes > 0 ? tout(lead, nodes - 1) : 0};
    }
  };
  template <typename Run>
  static void write_tree(Run& run, const Arguments& a, const Output& output) {
    write_columns(run, a, output, Columns{a.vector("tin"), a.vector("tout"), {}});
  }
};

using OfTrees = FamilyList<PrefixTree, PrefixTreeFromIntervals>;

}  // namespace flashmask::build
