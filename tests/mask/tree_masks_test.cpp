// SPDX-License-Identifier: Apache-2.0
// Masks of trees against predicates written from their definitions.
#include "flashmask/builders.h"

#include <gtest/gtest.h>

#include <set>
#include <utility>

#include "mask/builder_checks.h"

namespace flashmask::test {
namespace {

/// Parents in depth-first order with up to `roots` trees.
Numbers random_tree(Random& random, int64_t nodes) {
  Numbers parents;
  for (int64_t n = 0; n < nodes; ++n) {
    // Walk up from the node before it a random number of times; past a root it becomes a root itself.
    int64_t parent = n - 1;
    while (parent >= 0 && random.integer(0, 2) == 0) parent = parents[static_cast<std::size_t>(parent)];
    parents.push_back(parent);
  }
  return parents;
}

bool is_self_or_ancestor(const Numbers& parents, int64_t ancestor, int64_t node) {
  while (node > ancestor) node = parents[static_cast<std::size_t>(node)];
  return node == ancestor;
}

TEST(Builders, PrefixTree) {
  at_all_sizes([](Random& random, int64_t size) {
    const Numbers parents = random_tree(random, random.integer(0, 12));
    Numbers lengths;
    for (std::size_t n = 0; n < parents.size(); ++n)
      lengths.push_back(random.integer(0, 2) == 0 ? 0 : random.integer(0, size / 6 + 2));
    const Numbers owner = owners(lengths);
    const auto total = static_cast<int64_t>(owner.size());
    expect_predicate(masks::prefix_tree(parents, lengths), total, total, "prefix_tree", [&](int64_t i, int64_t j) {
      return j <= i &&
             is_self_or_ancestor(parents, owner[static_cast<std::size_t>(j)], owner[static_cast<std::size_t>(i)]);
    });
    // One token a node when no lengths are given.
    const auto nodes = static_cast<int64_t>(parents.size());
    expect_predicate(masks::prefix_tree(parents), nodes, nodes, "prefix_tree",
                     [&](int64_t i, int64_t j) { return j <= i && is_self_or_ancestor(parents, j, i); });
  });
}

/// Counts, for each token, the tokens before it on its path.
Numbers depths(const Numbers& parents, const Numbers& lengths) {
  Numbers end(parents.size()), depth;
  for (std::size_t n = 0; n < parents.size(); ++n) {
    const int64_t begin = parents[n] < 0 ? 0 : end[static_cast<std::size_t>(parents[n])];
    end[n] = begin + lengths[n];
    for (int64_t at = begin; at < end[n]; ++at) depth.push_back(at);
  }
  return depth;
}

TEST(Builders, PrefixTreeWithAWindow) {
  at_all_sizes([](Random& random, int64_t size) {
    const Numbers parents = random_tree(random, random.integer(0, 12));
    Numbers lengths;
    for (std::size_t n = 0; n < parents.size(); ++n)
      lengths.push_back(random.integer(0, 2) == 0 ? 0 : random.integer(0, size / 6 + 2));
    const Numbers owner = owners(lengths), depth = depths(parents, lengths);
    const auto total = static_cast<int64_t>(owner.size());
    const int64_t window = random.integer(1, size + 1);
    expect_predicate(
        masks::prefix_tree(parents, lengths, window), total, total, "prefix_tree", [&](int64_t i, int64_t j) {
          const auto row = static_cast<std::size_t>(i), key = static_cast<std::size_t>(j);
          return j <= i && is_self_or_ancestor(parents, owner[key], owner[row]) && depth[row] - depth[key] < window;
        });
  });
}

TEST(Builders, PathsOfATreeSeeWhatTheySeeAlone) {
  // A window of 3 over a root of 4 tokens and two answers: row 6, the second answer's first, sees 2 tokens of the root.
  const Mask tree = masks::prefix_tree(Numbers{-1, 0, 0}, Numbers{4, 2, 2}, 3);
  const Mask alone = masks::sliding_window(6, 6, 2, 0);
  for (const int64_t skipped : {0, 2}) {
    const auto token = [skipped](int64_t at) { return at < 4 ? at : at + skipped; };
    for (int64_t i = 0; i < 6; ++i) {
      for (int64_t j = 0; j < 6; ++j) EXPECT_EQ(tree.visible(0, 0, token(i), token(j)), alone.visible(0, 0, i, j));
    }
  }
  const auto positions = tree.q_pos();
  EXPECT_EQ(std::vector<int32_t>(positions.begin(), positions.end()), (std::vector<int32_t>{0, 1, 2, 3, 4, 5, 4, 5}));
}

TEST(Builders, PrefixTreeFromIntervals) {
  at_all_sizes([](Random& random, int64_t size) {
    const Numbers parents = random_tree(random, random.integer(0, 12));
    Numbers lengths, tin, tout;
    int64_t tokens = 0;
    for (std::size_t n = 0; n < parents.size(); ++n) {
      lengths.push_back(random.integer(0, 2) == 0 ? 0 : random.integer(0, size / 6 + 2));
      tin.push_back(tokens);
      tokens += lengths.back();
      tout.push_back(tokens);
    }
    for (std::size_t n = parents.size(); n-- > 0;) {
      if (parents[n] >= 0)
        tout[static_cast<std::size_t>(parents[n])] = std::max(tout[static_cast<std::size_t>(parents[n])], tout[n]);
    }
    const Numbers owner = owners(lengths);
    expect_predicate(masks::prefix_tree_from_intervals(tin, tout), tokens, tokens, "prefix_tree_from_intervals",
                     [&](int64_t i, int64_t j) {
                       return j <= i && is_self_or_ancestor(parents, owner[static_cast<std::size_t>(j)],
                                                            owner[static_cast<std::size_t>(i)]);
                     });
    const Mask windowed = masks::prefix_tree_from_intervals(tin, tout, 4),
               tree = masks::prefix_tree(parents, lengths, 4);
    EXPECT_EQ(windowed.view().content_hash, tree.view().content_hash);
  });
}

TEST(Builders, PrefixTreeSeveralRoots) {
  // Two roots of 2 and 1 tokens; the second has a child of 2.
  const Mask mask = masks::prefix_tree(Numbers{-1, -1, 1}, Numbers{2, 1, 2});
  EXPECT_EQ(draw(to_dense(mask), 5, 5),
            "#....\n"
            "##...\n"
            "..#..\n"
            "..##.\n"
            "..###\n");
}

/// Appends the turns that branch off after `parent`, each of which may branch again.
void branch_off(Random& random, int64_t parent, int64_t depth, Numbers& parents) {
  const auto own = static_cast<int64_t>(parents.size());
  parents.push_back(parent);
  for (int64_t n = depth > 0 ? random.integer(0, 3) : 0; n > 0; --n) branch_off(random, own, depth - 1, parents);
}

TEST(Builders, ForestOfConversationsThatBranchAtAnyTurn) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    Random random(seed);
    Numbers parents, lengths;
    for (int64_t prompt = random.integer(0, 3); prompt > 0; --prompt) branch_off(random, -1, 3, parents);
    for (std::size_t n = 0; n < parents.size(); ++n) lengths.push_back(random.integer(0, 4));
    const Numbers turn = owners(lengths);
    // Every conversation as its own sequence, from a last turn back to its prompt: what n separate runs would see.
    const auto total = static_cast<int64_t>(turn.size());
    std::set<std::pair<int64_t, int64_t>> seen;
    for (std::size_t last = 0; last < parents.size(); ++last) {
      std::set<int64_t> turns;
      for (auto at = static_cast<int64_t>(last); at >= 0; at = parents[static_cast<std::size_t>(at)]) turns.insert(at);
      Numbers sequence;
      for (int64_t t = 0; t < total; ++t) {
        if (turns.contains(turn[static_cast<std::size_t>(t)])) sequence.push_back(t);
      }
      for (std::size_t i = 0; i < sequence.size(); ++i) {
        for (std::size_t j = 0; j <= i; ++j) seen.insert({sequence[i], sequence[j]});
      }
    }
    expect_predicate(masks::prefix_tree(parents, lengths), total, total, "conversations",
                     [&](int64_t i, int64_t j) { return seen.contains({i, j}); });
  }
}

TEST(Builders, ReasoningThatLaterTurnsDoNotSee) {
  // A prompt of 1, reasoning of 2, its answer of 1, and two next turns of 1 and 2, which see the prompt and the answer
  // alone.
  const Mask tree = masks::prefix_tree(Numbers{-1, 0, 1, 2, 2}, Numbers{1, 2, 1, 1, 2});
  const Mask dropped = masks::eviction(Numbers{7, 4, 4, 7, 7, 7, 7});
  EXPECT_EQ(draw(to_dense(intersect(tree, dropped)), 7, 7),
            "#......\n"
            "##.....\n"
            "###....\n"
            "####...\n"
            "#..##..\n"
            "#..#.#.\n"
            "#..#.##\n");
  EXPECT_EQ(intersect(tree, dropped).num_intervals(), 1);
}

TEST(Builders, PrefixTreeOfAMillionNodesInOneChain) {
  // Linear in the nodes: a walk along the path for every node would take minutes.
  Numbers parents;
  for (int64_t n = 0; n < 1'000'000; ++n) parents.push_back(n - 1);
  const Mask mask = masks::prefix_tree(parents);
  EXPECT_TRUE(mask.visible(0, 0, 999'999, 0));
  EXPECT_FALSE(mask.visible(0, 0, 0, 1));
}

}  // namespace
}  // namespace flashmask::test
