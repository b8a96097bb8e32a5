// SPDX-License-Identifier: Apache-2.0
// Every builder against a predicate written from its definition, and its errors.
#include "flashmask/builders.h"
#include "flashmask/model_masks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <set>
#include <utility>

#include "common/random.h"
#include "support/brute_force.h"
#include "support/drawn_mask.h"
#include "support/expect_error.h"
#include "support/extent.h"

namespace flashmask::test {
namespace {

using Numbers = std::vector<int64_t>;
constexpr int64_t kSizes[] = {0, 1, 2, 3, 7, 13, 32, 65, 129};

/// Compares every element with `sees(i, j)`; the mask must stay within bounds.
template <typename Predicate>
void expect_predicate(const Mask& mask, int64_t seqlen_q, int64_t seqlen_k, const std::string& what, Predicate&& sees) {
  ASSERT_EQ(mask.seqlen_q(), seqlen_q) << what;
  ASSERT_EQ(mask.seqlen_k(), seqlen_k) << what;
  ASSERT_EQ(mask.batch(), 1) << what;
  ASSERT_EQ(mask.heads(), 1) << what;
  EXPECT_TRUE(mask.validate().empty()) << what << ": " << mask.validate()[0].what;
  std::vector<uint8_t> expected;
  for (int64_t i = 0; i < seqlen_q; ++i) {
    for (int64_t j = 0; j < seqlen_k; ++j) expected.push_back(sees(i, j));
  }
  const std::vector<uint8_t> got = to_dense(mask);
  if (seqlen_q <= 32 && seqlen_k <= 32) {
    EXPECT_EQ(draw(got, seqlen_q, seqlen_k), draw(expected, seqlen_q, seqlen_k)) << what;
  } else {
    EXPECT_TRUE(got == expected) << what << " at " << seqlen_q << "x" << seqlen_k;
  }
}

/// Random lengths, zeros among them, that add up to `total`.
Numbers random_lengths(Random& random, int64_t total) {
  Numbers lengths;
  for (int64_t left = total; left > 0;) {
    lengths.push_back(random.integer(0, 3) == 0 ? random.integer(0, 1) : random.integer(0, left));
    left -= lengths.back();
  }
  if (random.integer(0, 4) == 0) lengths.push_back(0);
  return lengths;
}

/// The document (block, group, ...) that each token belongs to: a table, so that the predicates below need no
/// boundaries.
Numbers owners(const Numbers& lengths) {
  Numbers owner;
  for (std::size_t n = 0; n < lengths.size(); ++n)
    owner.insert(owner.end(), static_cast<std::size_t>(lengths[n]), static_cast<int64_t>(n));
  return owner;
}

/// Runs `f(random, size)` at every size with several seeds.
template <typename F>
void at_all_sizes(F&& f) {
  for (const int64_t size : kSizes) {
    for (uint64_t seed = 0; seed < 12; ++seed) {
      Random random(seed * 1000 + static_cast<uint64_t>(size));
      f(random, size);
      if (testing::Test::HasFailure()) FAIL() << "at size " << size << ", seed " << seed;
    }
  }
}

TEST(Builders, Full) {
  for (const int64_t q : kSizes) {
    for (const int64_t k : kSizes)
      expect_predicate(masks::full(q, k), q, k, "full", [](int64_t, int64_t) { return true; });
  }
}

TEST(Builders, Causal) {
  for (const int64_t q : kSizes) {
    for (const int64_t k : kSizes) {
      expect_predicate(masks::causal(q, k), q, k, "causal", [&](int64_t i, int64_t j) { return j <= i + (k - q); });
      for (const int64_t offset : {-3, 0, 2})
        expect_predicate(masks::causal(q, k, offset), q, k, "causal",
                         [&](int64_t i, int64_t j) { return j <= i + offset; });
    }
  }
}

TEST(Builders, SlidingWindow) {
  Random random(1);
  for (const int64_t q : kSizes) {
    for (const int64_t k : kSizes) {
      for (int n = 0; n < 6; ++n) {
        const int64_t left = random.integer(-1, k + 1), right = random.integer(-1, 5),
                      offset = n % 2 ? k - q : random.integer(-5, 5);
        const Mask mask =
            n % 2 ? masks::sliding_window(q, k, left, right) : masks::sliding_window(q, k, left, right, offset);
        expect_predicate(mask, q, k, "sliding_window", [&](int64_t i, int64_t j) {
          const int64_t own = i + offset;
          return (left == -1 || j >= own - left) && (right == -1 || j <= own + right);
        });
      }
    }
  }
  // Right is 0 when left out: w visible keys a row for left = w - 1.
  const Mask mask = masks::sliding_window(9, 9, 3);
  for (int64_t i = 0; i < 9; ++i) {
    int64_t seen = 0;
    for (int64_t j = 0; j < 9; ++j) seen += mask.visible(0, 0, i, j);
    EXPECT_EQ(seen, std::min<int64_t>(i + 1, 4));
  }
}

TEST(Builders, CausalDocument) {
  at_all_sizes([](Random& random, int64_t size) {
    const Numbers lengths = random_lengths(random, size), owner = owners(lengths);
    expect_predicate(masks::causal_document(Documents::from_lengths(lengths)), size, size, "causal_document",
                     [&](int64_t i, int64_t j) {
                       return owner[static_cast<std::size_t>(i)] == owner[static_cast<std::size_t>(j)] && j <= i;
                     });
  });
}

TEST(Builders, Document) {
  at_all_sizes([](Random& random, int64_t size) {
    const Numbers lengths = random_lengths(random, size), owner = owners(lengths);
    expect_predicate(
        masks::document(Documents::from_lengths(lengths)), size, size, "document",
        [&](int64_t i, int64_t j) { return owner[static_cast<std::size_t>(i)] == owner[static_cast<std::size_t>(j)]; });
  });
}

TEST(Builders, SharedQuestion) {
  at_all_sizes([](Random& random, int64_t size) {
    std::vector<QuestionGroup> groups;
    Numbers group_of, part_of;  // part 0 is the question, 1, 2, ... the answers
    const auto add = [&](int64_t part, int64_t length) {
      group_of.insert(group_of.end(), static_cast<std::size_t>(length), static_cast<int64_t>(groups.size()));
      part_of.insert(part_of.end(), static_cast<std::size_t>(length), part);
    };
    for (int64_t left = size; left > 0;) {
      QuestionGroup group;
      group.question = random.integer(0, left);
      add(0, group.question);
      left -= group.question;
      for (int64_t answer = 1; answer <= random.integer(0, 4); ++answer) {
        group.answers.push_back(random.integer(0, left));
        add(answer, group.answers.back());
        left -= group.answers.back();
      }
      groups.push_back(group);
    }
    expect_predicate(masks::shared_question(groups), size, size, "shared_question", [&](int64_t row, int64_t key) {
      const auto i = static_cast<std::size_t>(row), j = static_cast<std::size_t>(key);
      return j <= i && group_of[i] == group_of[j] && (part_of[j] == 0 || part_of[j] == part_of[i]);
    });
  });
}

TEST(Builders, GlobalSlidingWindow) {
  at_all_sizes([](Random& random, int64_t size) {
    const int64_t global = random.integer(0, size + 2), window = random.integer(0, size + 2);
    expect_predicate(masks::global_sliding_window(size, global, window), size, size, "global_sliding_window",
                     [&](int64_t i, int64_t j) { return i < global || j < global || std::abs(i - j) <= window; });
  });
}

TEST(Builders, CausalBlockwise) {
  at_all_sizes([](Random& random, int64_t size) {
    const Numbers lengths = random_lengths(random, size), owner = owners(lengths);
    const int64_t last = static_cast<int64_t>(lengths.size()) - 1;
    expect_predicate(masks::causal_blockwise(Documents::from_lengths(lengths)), size, size, "causal_blockwise",
                     [&](int64_t row, int64_t key) {
                       const auto i = static_cast<std::size_t>(row), j = static_cast<std::size_t>(key);
                       return j <= i && (owner[i] == owner[j] || owner[i] == last);
                     });
  });
}

TEST(Builders, PrefixLmCausal) {
  at_all_sizes([](Random& random, int64_t size) {
    const int64_t prefix = random.integer(0, size);
    expect_predicate(masks::prefix_lm_causal(size, prefix), size, size, "prefix_lm_causal",
                     [&](int64_t i, int64_t j) { return j <= i || j < prefix; });
  });
}

TEST(Builders, PrefixLmDocument) {
  at_all_sizes([](Random& random, int64_t size) {
    const Numbers lengths = random_lengths(random, size), owner = owners(lengths);
    Numbers prefix, position;  // of each token in its document
    for (const int64_t length : lengths) {
      prefix.push_back(random.integer(0, length));
      for (int64_t t = 0; t < length; ++t) position.push_back(t);
    }
    expect_predicate(masks::prefix_lm_document(Documents::from_lengths(lengths), prefix), size, size,
                     "prefix_lm_document", [&](int64_t row, int64_t key) {
                       const auto i = static_cast<std::size_t>(row), j = static_cast<std::size_t>(key);
                       return owner[i] == owner[j] &&
                              (j <= i || position[j] < prefix[static_cast<std::size_t>(owner[j])]);
                     });
  });
}

TEST(Builders, QkSparse) {
  at_all_sizes([](Random& random, int64_t size) {
    std::vector<Span> dropped;
    Numbers span_end(static_cast<std::size_t>(size), 0);  // end of the span a key lies in, 0 for none
    for (int64_t at = random.integer(0, size); at <= size;) {
      const int64_t end = random.integer(at, size);
      dropped.push_back({at, end});
      for (int64_t j = at; j < end; ++j) span_end[static_cast<std::size_t>(j)] = end;
      at = end + random.integer(0, 9);
      if (random.integer(0, 3) == 0) break;
    }
    expect_predicate(masks::qk_sparse(size, dropped), size, size, "qk_sparse",
                     [&](int64_t i, int64_t j) { return j <= i && i >= span_end[static_cast<std::size_t>(j)]; });
  });
}

TEST(Builders, HashSparseSorted) {
  Random random(7);
  for (const int64_t q : kSizes) {
    for (const int64_t k : kSizes) {
      for (const bool causal : {false, true}) {
        const int64_t buckets = random.integer(1, 6);
        Numbers of_query, of_key;
        for (int64_t i = 0; i < q; ++i) of_query.push_back(random.integer(0, buckets));
        for (int64_t j = 0; j < k; ++j)
          of_key.push_back(random.integer(-1, buckets + 1));  // some in a bucket without rows
        std::sort(of_query.begin(), of_query.end());
        if (random.flip()) std::sort(of_key.begin(), of_key.end());
        expect_predicate(masks::hash_sparse(of_query, of_key, causal), q, k, "hash_sparse", [&](int64_t i, int64_t j) {
          return of_query[static_cast<std::size_t>(i)] == of_key[static_cast<std::size_t>(j)] &&
                 (!causal || j <= i + k - q);
        });
      }
    }
  }
}

TEST(Builders, HashSparseInAnyOrder) {
  // Where the rows of a bucket are scattered, it is exact if it fits and otherwise names the first column.
  Random random(8);
  int64_t refused = 0;
  for (int64_t n = 0; n < scaled(2000); ++n) {
    const int64_t q = random.integer(0, 9), k = random.integer(0, 9);
    const bool causal = random.flip();
    Numbers of_query, of_key;
    for (int64_t i = 0; i < q; ++i) of_query.push_back(random.integer(0, 2));
    for (int64_t j = 0; j < k; ++j) of_key.push_back(random.integer(0, 2));
    const auto sees = [&](int64_t i, int64_t j) {
      return of_query[static_cast<std::size_t>(i)] == of_key[static_cast<std::size_t>(j)] &&
             (!causal || j <= i + k - q);
    };
    std::vector<uint8_t> visible;
    for (int64_t i = 0; i < q; ++i) {
      for (int64_t j = 0; j < k; ++j) visible.push_back(sees(i, j));
    }
    const Dense dense{visible, q, k};
    const Fit fit = fit_beside(std::span(&dense, 1), causal ? Band::causal() : Band::none(), k - q);
    const auto build = [&] { return masks::hash_sparse(of_query, of_key, causal); };
    if (fit.most > 2) {
      ++refused;
      expect_error(ErrorCode::kUnrepresentable,
                   {"does not fit two row intervals",
                    "column " + std::to_string(fit.column) + " needs " + std::to_string(fit.needs),
                    "sort the queries by bucket"},
                   build);
    } else {
      expect_predicate(build(), q, k, "hash_sparse", sees);
    }
    if (HasFailure()) FAIL() << "case " << n;
  }
  EXPECT_GT(refused, 0);
}

TEST(Builders, Eviction) {
  at_all_sizes([](Random& random, int64_t size) {
    Numbers evicted_at, clamped;
    for (int64_t j = 0; j < size; ++j) evicted_at.push_back(random.integer(-3, size + 3));
    if (size > 0 && random.flip()) evicted_at[0] = random.flip() ? INT64_MAX : INT64_MIN;
    expect_predicate(masks::eviction(evicted_at), size, size, "eviction",
                     [&](int64_t i, int64_t j) { return j <= i && i < evicted_at[static_cast<std::size_t>(j)]; });
  });
}

TEST(Builders, RandomEviction) {
  for (const int64_t size : {0, 1, 2, 3, 8, 33, 500}) {
    for (uint64_t seed = 0; seed < 5; ++seed) {
      const Mask mask = masks::random_eviction(size, seed);
      ASSERT_EQ(mask.seqlen_q(), size);
      EXPECT_TRUE(mask.validate().empty());
      // Read off the mask: the first row at or after j that does not see key j.
      Numbers evicted(static_cast<std::size_t>(size), size);
      for (int64_t j = 0; j < size; ++j) {
        for (int64_t i = size - 1; i >= j && !mask.visible(0, 0, i, j); --i) evicted[static_cast<std::size_t>(j)] = i;
      }
      // Each row from size / 2 on evicts exactly one key before it; the others none.
      std::vector<int> evictions(static_cast<std::size_t>(size), 0);
      for (int64_t j = 0; j < size; ++j) {
        const int64_t row = evicted[static_cast<std::size_t>(j)];
        EXPECT_GT(row, j) << "a key sees its own row";
        if (row < size) ++evictions[static_cast<std::size_t>(row)];
      }
      for (int64_t i = 0; i < size; ++i)
        EXPECT_EQ(evictions[static_cast<std::size_t>(i)], i >= size / 2 && i > 0 ? 1 : 0)
            << "row " << i << " of " << size;
      // Nothing is hidden but by the diagonal and the evictions.
      for (int64_t i = 0; i < size; i += 7) {
        for (int64_t j = 0; j < size; ++j)
          ASSERT_EQ(mask.visible(0, 0, i, j), j <= i && i < evicted[static_cast<std::size_t>(j)]);
      }
      EXPECT_EQ(masks::random_eviction(size, seed).view().content_hash, mask.view().content_hash)
          << "the same seed gives the same mask";
    }
    if (size > 8) {
      std::set<uint64_t> hashes;
      for (uint64_t seed = 0; seed < 5; ++seed) hashes.insert(masks::random_eviction(size, seed).view().content_hash);
      EXPECT_EQ(hashes.size(), 5u);
    }
  }
}

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

TEST(Builders, Padding) {
  Random random(9);
  for (const int64_t q : kSizes) {
    for (const int64_t k : kSizes) {
      for (const bool with_queries : {false, true}) {
        Numbers key_lengths, query_lengths;
        for (int64_t b = 0; b < random.integer(1, 4); ++b) key_lengths.push_back(random.integer(0, k));
        for (std::size_t b = 0; with_queries && b < key_lengths.size(); ++b)
          query_lengths.push_back(random.integer(0, q));
        const Mask mask = masks::padding(q, k, key_lengths, query_lengths);
        EXPECT_TRUE(mask.validate().empty());
        ASSERT_EQ(mask.seqlen_q(), q);
        ASSERT_EQ(mask.seqlen_k(), k);
        if (k > 0) {
          ASSERT_EQ(mask.batch(), static_cast<int64_t>(key_lengths.size()));
        }
        for (int64_t b = 0; b < mask.batch(); ++b) {
          const auto at = static_cast<std::size_t>(b);
          for (int64_t i = 0; i < q; ++i) {
            for (int64_t j = 0; j < k; ++j) {
              ASSERT_EQ(mask.visible(b, 0, i, j), j < key_lengths[at] && (!with_queries || i < query_lengths[at]))
                  << b << " " << i << " " << j;
            }
          }
        }
      }
    }
  }
}

TEST(Builders, AttentionSinkWindow) {
  at_all_sizes([](Random& random, int64_t size) {
    const Numbers lengths = random_lengths(random, size), owner = owners(lengths);
    Numbers position;  // of each token in its document
    for (const int64_t length : lengths) {
      for (int64_t t = 0; t < length; ++t) position.push_back(t);
    }
    const int64_t sink = random.integer(0, size / 4 + 2),
                  window = random.integer(0, 3) == 0 ? -1 : random.integer(1, size / 2 + 2);
    expect_predicate(masks::attention_sink_window(Documents::from_lengths(lengths), sink, window), size, size,
                     "attention_sink_window", [&](int64_t row, int64_t key) {
                       const auto i = static_cast<std::size_t>(row), j = static_cast<std::size_t>(key);
                       return owner[i] == owner[j] && j <= i &&
                              (window == -1 || row - key < window || position[j] < sink);
                     });
  });
  const Documents documents = Documents::from_lengths(Numbers{4, 2});
  EXPECT_EQ(draw(to_dense(masks::attention_sink_window(documents, 1, 2)), 6, 6),
            "#.....\n"
            "##....\n"
            "###...\n"
            "#.##..\n"
            "....#.\n"
            "....##\n");
  EXPECT_EQ(to_dense(masks::attention_sink_window(documents, INT64_MAX, 1)),
            to_dense(masks::causal_document(documents)));
  EXPECT_EQ(to_dense(masks::attention_sink_window(documents, 0, INT64_MAX)),
            to_dense(masks::causal_document(documents)));
}

TEST(Builders, BlockCausal) {
  at_all_sizes([](Random& random, int64_t size) {
    const Numbers lengths = random_lengths(random, size), of_blocks = random_lengths(random, size);
    const Numbers owner = owners(lengths), block = owners(of_blocks);
    const int64_t window = random.integer(0, 2) == 0 ? -1 : random.integer(1, 4);
    const Documents blocks = Documents::from_lengths(of_blocks), documents = Documents::from_lengths(lengths);
    expect_predicate(
        masks::block_causal(blocks, documents, window), size, size, "block_causal", [&](int64_t row, int64_t key) {
          const auto i = static_cast<std::size_t>(row), j = static_cast<std::size_t>(key);
          return owner[i] == owner[j] && block[j] <= block[i] && (window == -1 || block[i] - block[j] < window);
        });
    EXPECT_EQ(to_dense(masks::block_causal(blocks, documents, INT64_MAX)),
              to_dense(masks::block_causal(blocks, documents)));
  });
}

TEST(Builders, BlockCausalInEqualBlocks) {
  at_all_sizes([](Random& random, int64_t size) {
    const Numbers lengths = random_lengths(random, size), owner = owners(lengths);
    Numbers position;  // of each token in its document
    for (const int64_t length : lengths) {
      for (int64_t t = 0; t < length; ++t) position.push_back(t);
    }
    const Documents documents = Documents::from_lengths(lengths);
    const int64_t length = random.integer(1, size + 2), window = random.integer(1, 4);
    const Mask mask = masks::block_causal(masks::equal_blocks(documents, length), documents, window);
    expect_predicate(mask, size, size, "block_causal", [&](int64_t row, int64_t key) {
      const auto i = static_cast<std::size_t>(row), j = static_cast<std::size_t>(key);
      const int64_t back = position[i] / length - position[j] / length;
      return owner[i] == owner[j] && back >= 0 && back < window;
    });
  });
}

TEST(Builders, CausalWithBlocks) {
  at_all_sizes([](Random& random, int64_t size) {
    const Numbers lengths = random_lengths(random, size), owner = owners(lengths);
    std::vector<Span> blocks;
    Numbers block_of(static_cast<std::size_t>(size), -1);
    int64_t at = 0;
    for (const int64_t length : lengths) {
      const int64_t end = at + length;
      while (random.integer(0, 3) != 0) {
        const int64_t begin = random.integer(at, end);
        at = random.integer(begin, end);
        for (int64_t t = begin; t < at; ++t)
          block_of[static_cast<std::size_t>(t)] = static_cast<int64_t>(blocks.size());
        blocks.push_back({begin, at});
      }
      at = end;
    }
    const int64_t window = random.integer(0, 2) == 0 ? -1 : random.integer(1, size / 3 + 2);
    expect_predicate(masks::causal_with_blocks(Documents::from_lengths(lengths), blocks, window), size, size,
                     "causal_with_blocks", [&](int64_t row, int64_t key) {
                       const auto i = static_cast<std::size_t>(row), j = static_cast<std::size_t>(key);
                       const bool before = j <= i && (window == -1 || row - key < window);
                       return owner[i] == owner[j] && (before || (block_of[i] >= 0 && block_of[i] == block_of[j]));
                     });
  });
  const Documents one = Documents::from_lengths(Numbers{6});
  EXPECT_EQ(draw(to_dense(masks::causal_with_blocks(one, std::vector<Span>{{1, 4}}, 2)), 6, 6),
            "#.....\n"
            "####..\n"
            ".###..\n"
            ".###..\n"
            "...##.\n"
            "....##\n");
  EXPECT_EQ(to_dense(masks::causal_with_blocks(one, {}, INT64_MAX)), to_dense(masks::causal(6, 6)));
}

TEST(Builders, ABlockInPartsMayNeedMoreThanTwoIntervals) {
  // What the documentation says of an image whose parts are parted by text.
  const auto in_parts = [](const Numbers& image) {
    std::vector<uint8_t> visible;
    for (std::size_t i = 0; i < image.size(); ++i) {
      for (std::size_t j = 0; j < image.size(); ++j) visible.push_back(j <= i || (image[i] != 0 && image[j] != 0));
    }
    return visible;
  };
  const auto two = in_parts({0, 1, 0, 1, 1, 0}), three = in_parts({0, 1, 0, 1, 0, 1, 1, 0});
  EXPECT_EQ(to_dense(from_dense(TensorView::contiguous(two.data(), DataType::kBool, {6, 6}))), two);
  expect_error(ErrorCode::kUnrepresentable, {"column 5"},
               [&] { from_dense(TensorView::contiguous(three.data(), DataType::kBool, {8, 8})); });
}

Numbers block_parts(const Numbers& owner, const Numbers& block) {
  Numbers part;  // of each token, counted up: the tokens that share a block and a document
  for (std::size_t t = 0; t < owner.size(); ++t) {
    const bool begins = t > 0 && (owner[t] != owner[t - 1] || block[t] != block[t - 1]);
    part.push_back(t == 0 ? 0 : part.back() + (begins ? 1 : 0));
  }
  return part;
}

/// The definition, over tokens of [x_t | x_0].
bool sees_in_diffusion(const Numbers& owner, const Numbers& part, int64_t row, int64_t key) {
  const auto total = static_cast<int64_t>(owner.size());
  const bool noisy_row = row < total, noisy_key = key < total;
  const auto i = static_cast<std::size_t>(row % total), j = static_cast<std::size_t>(key % total);
  if (owner[i] != owner[j]) return false;
  if (noisy_key) return noisy_row && part[i] == part[j];
  return noisy_row ? part[j] < part[i] : part[j] <= part[i];
}

TEST(Builders, BlockDiffusion) {
  at_all_sizes([](Random& random, int64_t size) {
    const Numbers lengths = random_lengths(random, size), of_blocks = random_lengths(random, size);
    const Numbers owner = owners(lengths), part = block_parts(owner, owners(of_blocks));
    const BlockDiffusion built =
        masks::block_diffusion(Documents::from_lengths(of_blocks), Documents::from_lengths(lengths));
    ASSERT_EQ(std::set<int64_t>(built.order.begin(), built.order.end()).size(), static_cast<std::size_t>(2 * size));
    expect_predicate(built.mask, 2 * size, 2 * size, "block_diffusion", [&](int64_t row, int64_t key) {
      return sees_in_diffusion(owner, part, built.order[static_cast<std::size_t>(row)],
                               built.order[static_cast<std::size_t>(key)]);
    });
    for (int64_t n = 0; n < 2 * size; ++n) {
      // Each block's noisy copy and then its clean one: by block, then by copy, then by token.
      const auto place = [&](int64_t at) {
        const int64_t token = built.order[static_cast<std::size_t>(at)];
        return std::array{part[static_cast<std::size_t>(token % size)], token / size, token};
      };
      if (n > 0) {
        ASSERT_LT(place(n - 1), place(n));
      }
    }
  });
}

TEST(Builders, BlockDiffusionDrawn) {
  const Documents text = Documents::from_lengths(Numbers{4}), blocks = masks::equal_blocks(text, 2);
  const BlockDiffusion interleaved = masks::block_diffusion(blocks, text);
  EXPECT_EQ(interleaved.order, (Numbers{0, 1, 4, 5, 2, 3, 6, 7}));
  EXPECT_EQ(draw(to_dense(interleaved.mask), 8, 8),
            "##......\n"
            "##......\n"
            "..##....\n"
            "..##....\n"
            "..####..\n"
            "..####..\n"
            "..##..##\n"
            "..##..##\n");
  const BlockDiffusion concatenated = masks::block_diffusion(blocks, text, BlockDiffusionOrder::kConcatenated);
  EXPECT_EQ(concatenated.order, (Numbers{0, 1, 2, 3, 4, 5, 6, 7}));
  EXPECT_EQ(draw(to_dense(concatenated.mask), 8, 8),
            "##......\n"
            "##......\n"
            "..####..\n"
            "..####..\n"
            "....##..\n"
            "....##..\n"
            "....####\n"
            "....####\n");
}

TEST(Builders, BlockDiffusionConcatenated) {
  int64_t fitted = 0, refused = 0;
  at_all_sizes([&](Random& random, int64_t size) {
    const Numbers lengths = random_lengths(random, size), of_blocks = random_lengths(random, size);
    const Numbers owner = owners(lengths), part = block_parts(owner, owners(of_blocks));
    // From the dense matrix: what one would get without the builder.
    std::vector<uint8_t> visible;
    for (int64_t row = 0; row < 2 * size; ++row) {
      for (int64_t key = 0; key < 2 * size; ++key) visible.push_back(sees_in_diffusion(owner, part, row, key));
    }
    const auto build = [&] {
      return masks::block_diffusion(Documents::from_lengths(of_blocks), Documents::from_lengths(lengths),
                                    BlockDiffusionOrder::kConcatenated);
    };
    // A clean key needs a third run exactly where its document has later blocks and is not the last.
    bool fits = true;
    for (std::size_t t = 0; t < owner.size(); ++t) {
      const bool more_blocks = std::any_of(part.begin(), part.end(), [&](const int64_t& other) {
        const auto at = static_cast<std::size_t>(&other - part.data());
        return owner[at] == owner[t] && other > part[t];
      });
      fits = fits && !(more_blocks && owner[t] != owner.back());
    }
    ++(fits ? fitted : refused);
    if (fits) {
      EXPECT_TRUE(to_dense(build().mask) == visible);
    } else {
      expect_error(ErrorCode::kUnrepresentable, {"order kConcatenated", "needs 3", "kInterleaved fits"}, build);
    }
  });
  EXPECT_GT(fitted, 20);
  EXPECT_GT(refused, 20);
}

TEST(Builders, Eagle3Ttt) {
  at_all_sizes([](Random& random, int64_t size) {
    const Numbers lengths = random_lengths(random, size), owner = owners(lengths);
    const int64_t steps = random.integer(1, 5);
    expect_predicate(masks::eagle3_ttt(Documents::from_lengths(lengths), steps), size, steps * size, "eagle3_ttt",
                     [&](int64_t row, int64_t key) {
                       const auto i = static_cast<std::size_t>(row), j = static_cast<std::size_t>(key % size);
                       return key < size ? owner[i] == owner[j] && j <= i : i == j;
                     });
  });
  const Documents documents = Documents::from_lengths(Numbers{2, 1});
  EXPECT_EQ(draw(to_dense(masks::eagle3_ttt(documents, 3)), 3, 9),
            "#..#..#..\n"
            "##..#..#.\n"
            "..#..#..#\n");
  EXPECT_EQ(to_dense(masks::eagle3_ttt(documents, 1)), to_dense(masks::causal_document(documents)));
  EXPECT_EQ(masks::eagle3_ttt(Documents{}, INT64_MAX).seqlen_k(), 0);
}

TEST(Builders, AllPassesOfEagle3AreATreeTokenByToken) {
  // Pass after pass, a key of the first pass is seen by a run of rows in every pass. Token by token it is a tree: a
  // token's chain of passes branches off the text.
  constexpr int64_t kTokens = 5, kSteps = 3;
  Numbers parents;
  for (int64_t node = 0; node < kTokens * kSteps; ++node)
    parents.push_back(node % kSteps == 0 ? std::max<int64_t>(node - kSteps, -1) : node - 1);
  const Mask tree = masks::prefix_tree(parents),
             last = masks::eagle3_ttt(Documents::from_lengths(Numbers{kTokens}), kSteps);
  for (int64_t i = 0; i < kTokens; ++i) {
    for (int64_t j = 0; j < kTokens * kSteps; ++j) {
      EXPECT_EQ(last.visible(0, 0, i, j),
                tree.visible(0, 0, i * kSteps + kSteps - 1, j % kTokens * kSteps + j / kTokens))
          << i << " " << j;
    }
  }
}

TEST(Builders, DFlash) {
  at_all_sizes([](Random& random, int64_t size) {
    const Numbers lengths = random_lengths(random, size), owner = owners(lengths);
    Numbers anchors(static_cast<std::size_t>(random.integer(0, 9)));
    for (int64_t& anchor : anchors) anchor = random.integer(0, size);
    std::sort(anchors.begin(), anchors.end());
    const int64_t block = random.integer(1, 5), drafts = static_cast<int64_t>(anchors.size()) * block;
    expect_predicate(masks::dflash(Documents::from_lengths(lengths), anchors, block), drafts, size + drafts, "dflash",
                     [&](int64_t row, int64_t key) {
                       if (key >= size) return (key - size) / block == row / block;
                       const int64_t anchor = anchors[static_cast<std::size_t>(row / block)];
                       const int64_t document = anchor == size ? owner.back() : owner[static_cast<std::size_t>(anchor)];
                       return key < anchor && owner[static_cast<std::size_t>(key)] == document;
                     });
  });
  EXPECT_EQ(draw(to_dense(masks::dflash(Documents::from_lengths(Numbers{3, 2}), Numbers{1, 2, 4, 5}, 2)), 8, 13),
            "#....##......\n"
            "#....##......\n"
            "##.....##....\n"
            "##.....##....\n"
            "...#.....##..\n"
            "...#.....##..\n"
            "...##......##\n"
            "...##......##\n");
}

// --- Errors -------------------------------------------------------------------------------------------

TEST(BuilderErrors, Lengths) {
  expect_invalid({"seqlen_q is -1"}, [] { masks::full(-1, 3); });
  expect_invalid({"seqlen_k is -1"}, [] { masks::causal(3, -1); });
  expect_invalid({"window left is -2"}, [] { masks::sliding_window(3, 3, -2); });
  expect_invalid({"window right is -2"}, [] { masks::sliding_window(3, 3, 0, -2); });
  expect_invalid({"seqlen is -1"}, [] { masks::global_sliding_window(-1, 0, 0); });
  expect_invalid({"global_tokens is -1"}, [] { masks::global_sliding_window(3, -1, 0); });
  expect_invalid({"window is -4"}, [] { masks::global_sliding_window(3, 0, -4); });
  expect_invalid({"more than 2147483647"}, [] { masks::global_sliding_window(kMaxSeqlen + 1, 0, 0); });
  expect_invalid({"seqlen is -1"}, [] { masks::prefix_lm_causal(-1, 0); });
  expect_invalid({"more than 2147483647"}, [] { masks::prefix_lm_causal(kMaxSeqlen + 1, 0); });
  expect_invalid({"seqlen is -1"}, [] { masks::qk_sparse(-1, {}); });
  expect_invalid({"more than 2147483647"}, [] { masks::qk_sparse(kMaxSeqlen + 1, {}); });
  expect_invalid({"seqlen is -7"}, [] { masks::random_eviction(-7, 0); });
  expect_invalid({"more than 2147483647"}, [] { masks::random_eviction(kMaxSeqlen + 1, 0); });
}

TEST(BuilderErrors, SharedQuestion) {
  const auto build = [](std::vector<QuestionGroup> groups) { return [groups] { masks::shared_question(groups); }; };
  expect_invalid({"question[1] is -3", "at least 0"}, build({{1, {1}}, {-3, {1}}}));
  expect_invalid({"answers of question[0] is -1", "at least 0"}, build({{1, {1, -1}}}));
  expect_invalid({"more than 2147483647"}, build({{kMaxSeqlen + 1, {}}}));
  expect_invalid({"more than 2147483647"}, build({{1, {kMaxSeqlen + 1}}}));
  expect_invalid({"more than 2147483647"}, build({{0, {kMaxSeqlen, 1}}}));
  expect_invalid({"more than 2147483647"}, build({{2, {}}, {kMaxSeqlen - 1, {}}}));
}

TEST(BuilderErrors, Prefix) {
  expect_invalid({"prefix is -1", "between 0 and seqlen, 4"}, [] { masks::prefix_lm_causal(4, -1); });
  expect_invalid({"prefix is 5", "between 0 and seqlen, 4"}, [] { masks::prefix_lm_causal(4, 5); });
  const Documents documents = Documents::from_lengths(Numbers{2, 3});
  expect_invalid({"prefix has 1 entries", "2 documents"}, [&] { masks::prefix_lm_document(documents, Numbers{1}); });
  expect_invalid({"prefix[1] is 4", "document's length, 3"},
                 [&] { masks::prefix_lm_document(documents, Numbers{1, 4}); });
  expect_invalid({"prefix[0] is -1", "document's length, 2"},
                 [&] { masks::prefix_lm_document(documents, Numbers{-1, 4}); });
}

TEST(BuilderErrors, QkSparse) {
  const auto build = [](std::vector<Span> dropped) { return [dropped] { masks::qk_sparse(10, dropped); }; };
  expect_invalid({"dropped[0] is [-1, 3)", "[0, 10)"}, build({{-1, 3}}));
  expect_invalid({"dropped[0] is [3, 2)", "ascending"}, build({{3, 2}}));
  expect_invalid({"dropped[0] is [3, 11)", "[0, 10)"}, build({{3, 11}}));
  expect_invalid({"dropped[1] is [4, 6)", "disjoint"}, build({{3, 5}, {4, 6}}));
  expect_invalid({"dropped[1] is [0, 1)", "ascending"}, build({{3, 5}, {0, 1}}));
}

TEST(BuilderErrors, PrefixTree) {
  expect_invalid({"lengths has 1 entries", "2 nodes"}, [] { masks::prefix_tree(Numbers{-1, 0}, Numbers{1}); });
  expect_invalid({"parents[0] is 0", "earlier node"}, [] { masks::prefix_tree(Numbers{0}); });
  expect_invalid({"parents[1] is 2", "earlier node"}, [] { masks::prefix_tree(Numbers{-1, 2, 0}); });
  expect_invalid({"parents[1] is -2", "-1 (a root)"}, [] { masks::prefix_tree(Numbers{-1, -2}); });
  expect_invalid({"lengths[1] is -5", "at least 0"}, [] { masks::prefix_tree(Numbers{-1, 0}, Numbers{1, -5}); });
  expect_invalid({"more than 2147483647"}, [] { masks::prefix_tree(Numbers{-1, 0}, Numbers{kMaxSeqlen, 1}); });
  expect_invalid({"more than 2147483647"}, [] { masks::prefix_tree(Numbers{-1, 0}, Numbers{1, INT64_MAX}); });
  // Node 3 goes back to node 1, whose subtree ended when node 2 began.
  expect_invalid({"node 3 with parent 1", "depth-first"}, [] { masks::prefix_tree(Numbers{-1, 0, 0, 1}); });
  // Under a second root, nodes of the first tree are closed.
  expect_invalid({"node 2 with parent 0", "depth-first"}, [] { masks::prefix_tree(Numbers{-1, -1, 0}); });
}

TEST(BuilderErrors, PrefixTreeFromIntervals) {
  const auto build = [](Numbers tin, Numbers tout) {
    return [tin, tout] { masks::prefix_tree_from_intervals(tin, tout); };
  };
  expect_invalid({"tin has 2 entries and tout 1"}, build({0, 1}, {2}));
  expect_invalid({"node 0 has the interval [1, 2)", "begin at 0"}, build({1}, {2}));
  expect_invalid({"node 0 has the interval [0, -1)"}, build({0}, {-1}));
  expect_invalid({"node 1 has the interval [1, 4)", "inside of its parent's"}, build({0, 1}, {3, 4}));
  expect_invalid({"node 2 has the interval [4, 5)", "begin at 3"}, build({0, 1, 4}, {6, 3, 5}));
  expect_invalid({"node 1 has the interval [2, 3)", "begin at 1"}, build({0, 2}, {1, 3}));
  expect_invalid({"ends at 5", "ends at 3", "before its children"}, build({0, 1}, {5, 3}));
  expect_invalid({"node 0 has the interval [0, 2147483648)"}, build({0}, {kMaxSeqlen + 1}));
}

TEST(BuilderErrors, AttentionSinkWindow) {
  const Documents documents = Documents::from_lengths(Numbers{2, 3});
  expect_invalid({"sink is -1", "at least 0"}, [&] { masks::attention_sink_window(documents, -1, 2); });
  expect_invalid({"window is 0", "at least 1, or -1 for all"}, [&] { masks::attention_sink_window(documents, 1, 0); });
  expect_invalid({"window is -2", "at least 1, or -1 for all"},
                 [&] { masks::attention_sink_window(documents, 1, -2); });
}

TEST(BuilderErrors, BlockCausal) {
  const Documents documents = Documents::from_lengths(Numbers{2, 3}), blocks = Documents::from_lengths(Numbers{2, 2});
  expect_invalid({"blocks add up to 4", "documents' 5"}, [&] { masks::block_causal(blocks, documents); });
  expect_invalid({"window is 0", "at least 1, or -1 for all"}, [&] { masks::block_causal(documents, documents, 0); });
  expect_invalid({"length is 0", "at least 1 token"}, [&] { masks::equal_blocks(documents, 0); });
}

TEST(BuilderErrors, CausalWithBlocks) {
  const auto build = [](std::vector<Span> blocks, int64_t window) {
    return [blocks, window] { masks::causal_with_blocks(Documents::from_lengths(Numbers{4, 0, 6}), blocks, window); };
  };
  expect_invalid({"blocks[0] is [-1, 3)", "[0, 10)"}, build({{-1, 3}}, -1));
  expect_invalid({"blocks[1] is [2, 4)", "disjoint"}, build({{1, 3}, {2, 4}}, -1));
  expect_invalid({"blocks[1] is [3, 5)", "document 0 ends at 4", "must lie in one document"},
                 build({{1, 2}, {3, 5}}, -1));
  expect_invalid({"window is 0", "at least 1, or -1 for all"}, build({}, 0));
}

TEST(BuilderErrors, BlockDiffusion) {
  const Documents documents = Documents::from_lengths(Numbers{2, 3}), blocks = Documents::from_lengths(Numbers{2, 2});
  expect_invalid({"blocks add up to 4", "documents' 5"}, [&] { masks::block_diffusion(blocks, documents); });
  const Documents long_text = Documents::from_lengths(Numbers{kMaxSeqlen / 2 + 1});
  expect_invalid({"two copies of 1073741824 tokens", "2147483647"},
                 [&] { masks::block_diffusion(long_text, long_text); });
  const Documents halves = masks::equal_blocks(Documents::from_lengths(Numbers{4, 2}), 2);
  expect_error(ErrorCode::kUnrepresentable, {"order kConcatenated", "column 6 needs 3", "kInterleaved fits"}, [&] {
    masks::block_diffusion(halves, Documents::from_lengths(Numbers{4, 2}), BlockDiffusionOrder::kConcatenated);
  });
}

TEST(BuilderErrors, Eagle3Ttt) {
  const Documents documents = Documents::from_lengths(Numbers{2, 3});
  expect_invalid({"steps is 0", "at least 1"}, [&] { masks::eagle3_ttt(documents, 0); });
  expect_invalid({"steps is 429496730", "5 tokens", "more than 2147483647 keys"},
                 [&] { masks::eagle3_ttt(documents, 429496730); });
  expect_invalid({"steps is 9223372036854775807"}, [&] { masks::eagle3_ttt(documents, INT64_MAX); });
}

TEST(BuilderErrors, DFlash) {
  const Documents documents = Documents::from_lengths(Numbers{2, 3});
  expect_invalid({"block is 0", "at least 1"}, [&] { masks::dflash(documents, Numbers{1}, 0); });
  expect_invalid({"anchors[1] is 6", "between 0 and the length of the context, 5"},
                 [&] { masks::dflash(documents, Numbers{1, 6}, 2); });
  expect_invalid({"anchors[0] is -1", "between 0"}, [&] { masks::dflash(documents, Numbers{-1}, 2); });
  expect_invalid({"anchors[2] is 1, less than the one before it, 3", "sort the blocks by anchor"},
                 [&] { masks::dflash(documents, Numbers{1, 3, 1}, 2); });
  expect_invalid({"block is 1073741822", "2 of them and 5 tokens", "more than 2147483647 keys"},
                 [&] { masks::dflash(documents, Numbers{1, 2}, 1073741822); });
  expect_invalid({"block is 9223372036854775807"}, [&] { masks::dflash(documents, Numbers{1, 2}, INT64_MAX); });
}

TEST(BuilderErrors, Padding) {
  expect_invalid({"seqlen_q is -1"}, [] { masks::padding(-1, 3, Numbers{1}); });
  expect_invalid({"seqlen_k is -1"}, [] { masks::padding(3, -1, Numbers{1}); });
  expect_invalid({"more than 2147483647"}, [] { masks::padding(3, kMaxSeqlen + 1, Numbers{1}); });
  expect_invalid({"key_lengths is empty"}, [] { masks::padding(3, 3, {}); });
  expect_invalid({"query_lengths has 1 entries and key_lengths 2"},
                 [] { masks::padding(3, 3, Numbers{1, 2}, Numbers{1}); });
  expect_invalid({"key_lengths[1] is 4", "seqlen_k, 3"}, [] { masks::padding(5, 3, Numbers{1, 4}); });
  expect_invalid({"key_lengths[0] is -1", "seqlen_k, 3"}, [] { masks::padding(5, 3, Numbers{-1}); });
  expect_invalid({"query_lengths[0] is 6", "seqlen_q, 5"}, [] { masks::padding(5, 3, Numbers{1}, Numbers{6}); });
  expect_invalid({"query_lengths[0] is -2", "seqlen_q, 5"}, [] { masks::padding(5, 3, Numbers{1}, Numbers{-2}); });
}

}  // namespace
}  // namespace flashmask::test
