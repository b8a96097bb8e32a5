// SPDX-License-Identifier: Apache-2.0
// Every builder of model_masks.h against a predicate written from its definition.
#include "flashmask/model_masks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>

#include "flashmask/builders.h"
#include "mask/builder_checks.h"
#include "support/expect_error.h"

namespace flashmask::test {
namespace {

TEST(Builders, AttentionSinkWindow) {
  at_all_sizes([](Random& random, int64_t size) {
    const Numbers lengths = random_lengths(random, size), owner = owners(lengths);
    Numbers position;  // each token's, in its document
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
    Numbers position;  // each token's, in its document
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
  // An image whose parts are separated by text, as the documentation describes it.
  const auto in_parts = [](const Numbers& image) {
    std::vector<uint8_t> visible;
    for (std::size_t i = 0; i < image.size(); ++i) {
      for (std::size_t j = 0; j < image.size(); ++j) visible.push_back(j <= i || (image[i] != 0 && image[j] != 0));
    }
    return visible;
  };
  const auto two = in_parts({0, 1, 0, 1, 1, 0}), three = in_parts({0, 1, 0, 1, 0, 1, 1, 0});
  const Mask of_two = from_dense(TensorView::contiguous(two.data(), DataType::kBool, {6, 6})),
             of_three = from_dense(TensorView::contiguous(three.data(), DataType::kBool, {8, 8}));
  EXPECT_EQ(to_dense(of_two), two);
  EXPECT_FALSE(of_two.has_interval_lists());
  EXPECT_EQ(to_dense(of_three), three);
  EXPECT_EQ(of_three.column_ptr()[6] - of_three.column_ptr()[5], 3);
}

Numbers block_parts(const Numbers& owner, const Numbers& block) {
  Numbers part;  // each token's, counted up: tokens of a part share a block and a document
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
  int64_t fitted = 0, listed = 0;
  at_all_sizes([&](Random& random, int64_t size) {
    const Numbers lengths = random_lengths(random, size), of_blocks = random_lengths(random, size);
    const Numbers owner = owners(lengths), part = block_parts(owner, owners(of_blocks));
    // From the dense matrix: what one would get without the builder.
    std::vector<uint8_t> visible;
    for (int64_t row = 0; row < 2 * size; ++row) {
      for (int64_t key = 0; key < 2 * size; ++key) visible.push_back(sees_in_diffusion(owner, part, row, key));
    }
    const Mask mask = masks::block_diffusion(Documents::from_lengths(of_blocks), Documents::from_lengths(lengths),
                                             BlockDiffusionOrder::kConcatenated)
                          .mask;
    // A clean key needs a third run exactly where its document has later blocks and is not the last.
    bool fits = true;
    for (std::size_t t = 0; t < owner.size(); ++t) {
      const bool more_blocks = std::any_of(part.begin(), part.end(), [&](const int64_t& other) {
        const auto at = static_cast<std::size_t>(&other - part.data());
        return owner[at] == owner[t] && other > part[t];
      });
      fits = fits && !(more_blocks && owner[t] != owner.back());
    }
    ++(fits ? fitted : listed);
    EXPECT_TRUE(to_dense(mask) == visible);
    EXPECT_EQ(mask.has_interval_lists(), !fits);
  });
  EXPECT_GT(fitted, 20);
  EXPECT_GT(listed, 20);
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

}  // namespace
}  // namespace flashmask::test
