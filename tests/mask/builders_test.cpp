// SPDX-License-Identifier: Apache-2.0
// Every builder of builders.h but the trees against a predicate written from its definition.
#include "flashmask/builders.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "mask/builder_checks.h"
#include "support/expect_error.h"
#include "support/extent.h"

namespace flashmask::test {
namespace {

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
    Numbers prefix, position;  // each token's, in its document
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
  // If a bucket's rows are scattered, the mask is exact if it fits; otherwise the error names the first column.
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

}  // namespace
}  // namespace flashmask::test
