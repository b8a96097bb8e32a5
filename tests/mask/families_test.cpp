// SPDX-License-Identifier: Apache-2.0
// Mask families by name: samples at every length, explicit parameters, errors.
#include "families/families.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "flashmask/builders.h"
#include "flashmask/model_masks.h"
#include "support/expect_error.h"
#include "support/library_families.h"

namespace flashmask::test {
namespace {

using Numbers = std::vector<int64_t>;

std::vector<std::string> names() {
  std::vector<std::string> all;
  for (const Family& family : families()) all.emplace_back(family.name);
  return all;
}

TEST(Families, TheListIsComplete) {
  std::set<std::string> listed;
  for (const std::string& name : names()) listed.insert(name);
  // prefix_tree by other parameters; a text has one way to give a tree.
  listed.insert("prefix_tree_from_intervals");
  for (const std::string& name : known_families()) EXPECT_TRUE(listed.contains(name)) << name;
  for (const Family& family : families()) {
    EXPECT_FALSE(family.definition.empty()) << family.name;
    for (const FamilyParameter& parameter : family.parameters) {
      EXPECT_FALSE(parameter.name.empty()) << family.name;
      EXPECT_FALSE(parameter.help.empty()) << family.name << " " << parameter.name;
    }
  }
}

TEST(Families, BuildAtEveryLength) {
  for (const std::string& name : names()) {
    for (const int64_t seqlen : {0, 1, 2, 7, 64, 129, 300}) {
      for (uint64_t seed = 0; seed < 20; ++seed) {
        const Mask mask = make_family(name, seqlen, {}, seed);
        ASSERT_EQ(mask.seqlen_q(), seqlen) << name << " " << seed;
        ASSERT_EQ(mask.seqlen_k(), seqlen) << name << " " << seed;
        const auto findings = mask.validate();
        ASSERT_TRUE(findings.empty()) << name << " at " << seqlen << ", seed " << seed << ": " << findings[0].what;
        ASSERT_EQ(make_family(name, seqlen, {}, seed).view().content_hash, mask.view().content_hash)
            << "one seed, one mask: " << name;
      }
    }
  }
}

TEST(Families, SamplesAreNeitherEmptyNorAllTheSame) {
  for (const Family& family : families()) {
    const std::string name(family.name);
    std::set<uint64_t> hashes;
    for (uint64_t seed = 0; seed < 20; ++seed) {
      const Mask mask = make_family(name, 300, {}, seed);
      hashes.insert(mask.view().content_hash);
      int64_t visible = 0;
      for (const uint8_t element : to_dense(mask)) visible += element;
      EXPECT_GT(visible, 300) << name << " " << seed;
      if (name != "full") {
        EXPECT_LT(visible, 300 * 300) << name << " " << seed;
      }
    }
    const bool is_drawn = std::any_of(family.parameters.begin(), family.parameters.end(), [](const FamilyParameter& p) {
      return p.help.find("draw") != std::string_view::npos;
    });
    EXPECT_EQ(hashes.size() > 1, is_drawn) << name;
  }
}

TEST(Families, ADocumentedDefault) {
  EXPECT_EQ(make_family("sliding_window", 64).band(), Band::window(64 / 16 - 1, 0));
  EXPECT_EQ(to_dense(make_family("prefix_lm_causal", 20)), to_dense(masks::prefix_lm_causal(20, 10)));
  EXPECT_EQ(to_dense(make_family("global_sliding_window", 160)), to_dense(masks::global_sliding_window(160, 16, 10)));
  EXPECT_EQ(to_dense(make_family("global_sliding_window", 40)), to_dense(masks::global_sliding_window(40, 10, 2)));
}

TEST(Families, ExplicitParameters) {
  const auto same = [](const Mask& a, const Mask& b) {
    EXPECT_EQ(a.batch(), b.batch());
    EXPECT_EQ(to_dense(a), to_dense(b));
  };
  const Documents documents = Documents::from_lengths(Numbers{3, 0, 5, 2});
  same(make_family("causal", 10, {{"q_offset", "-2"}}), masks::causal(10, 10, -2));
  same(make_family("sliding_window", 10, {{"left", "3"}, {"right", "1"}}), masks::sliding_window(10, 10, 3, 1));
  same(make_family("sliding_window", 10, {{"left", "-1"}}), masks::sliding_window(10, 10, -1, 0));
  same(make_family("causal_document", 10, {{"lengths", "3,0,5,2"}}), masks::causal_document(documents));
  same(make_family("document", 10, {{"lengths", "3,0,5,2"}}), masks::document(documents));
  same(make_family("global_sliding_window", 10, {{"global", "2"}, {"window", "1"}}),
       masks::global_sliding_window(10, 2, 1));
  same(make_family("causal_blockwise", 10, {{"lengths", "3,0,5,2"}}), masks::causal_blockwise(documents));
  same(make_family("prefix_lm_causal", 10, {{"prefix", "4"}}), masks::prefix_lm_causal(10, 4));
  same(make_family("prefix_lm_document", 10, {{"lengths", "3,0,5,2"}, {"prefix", "1,0,5,0"}}),
       masks::prefix_lm_document(documents, Numbers{1, 0, 5, 0}));
  same(make_family("qk_sparse", 10, {{"spans", "1,3,5,9"}}), masks::qk_sparse(10, std::vector<Span>{{1, 3}, {5, 9}}));
  same(make_family("hash_sparse", 4, {{"query_buckets", "0,0,1,2"}, {"key_buckets", "2,1,0,0"}, {"causal", "0"}}),
       masks::hash_sparse(Numbers{0, 0, 1, 2}, Numbers{2, 1, 0, 0}, false));
  same(make_family("random_eviction", 10, {{"seed", "5"}}), masks::random_eviction(10, 5));
  same(make_family("eviction", 3, {{"evicted_at", "2,3,3"}}), masks::eviction(Numbers{2, 3, 3}));
  same(make_family("prefix_tree", 10, {{"parents", "-1,0,0"}, {"lengths", "5,2,3"}}),
       masks::prefix_tree(Numbers{-1, 0, 0}, Numbers{5, 2, 3}));
  same(make_family("prefix_tree", 10, {{"parents", "-1,0,0"}}),
       masks::prefix_tree(Numbers{-1, 0, 0}, Numbers{3, 3, 4}));
  same(make_family("padding", 10, {{"key_lengths", "3,10"}}), masks::padding(10, 10, Numbers{3, 10}));
  same(make_family("padding", 10, {{"key_lengths", "3,10"}, {"query_lengths", "4,0"}}),
       masks::padding(10, 10, Numbers{3, 10}, Numbers{4, 0}));
  same(make_family("attention_sink_window", 10, {{"lengths", "3,0,5,2"}, {"sink", "1"}, {"window", "2"}}),
       masks::attention_sink_window(documents, 1, 2));
  const Documents one = Documents::from_lengths(Numbers{10});
  same(make_family("attention_sink_window", 10, {{"window", "3"}}), masks::attention_sink_window(one, 4, 3));
  same(make_family("block_causal", 10, {{"lengths", "3,0,5,2"}, {"blocks", "1,5,4"}, {"window", "2"}}),
       masks::block_causal(Documents::from_lengths(Numbers{1, 5, 4}), documents, 2));
  same(make_family("block_causal", 10, {{"lengths", "3,0,5,2"}, {"blocks", "4"}}),
       masks::block_causal(Documents::from_lengths(Numbers{3, 4, 1, 2}), documents));
  same(make_family("block_causal", 10, {{"blocks", "10"}}), masks::full(10, 10));
  same(make_family("block_causal", 16, {{"window", "3"}}),
       masks::block_causal(Documents::from_lengths(Numbers(8, 2)), Documents::from_lengths(Numbers{16}), 3));
  same(make_family("causal_with_blocks", 10, {{"lengths", "3,0,5,2"}, {"blocks", "1,3,4,7"}, {"window", "2"}}),
       masks::causal_with_blocks(documents, std::vector<Span>{{1, 3}, {4, 7}}, 2));
  same(make_family("causal_with_blocks", 10, {{"blocks", "2,9"}}),
       masks::causal_with_blocks(one, std::vector<Span>{{2, 9}}));
}

/// The mask is this part of the square; the rest of the square is hidden.
void expect_part(const Mask& square, int64_t first_row, const Mask& mask) {
  const std::vector<uint8_t> part = to_dense(mask);
  for (int64_t i = 0; i < square.seqlen_q(); ++i) {
    for (int64_t j = 0; j < square.seqlen_k(); ++j) {
      const int64_t row = i - first_row;
      const bool inside = row >= 0 && row < mask.seqlen_q() && j < mask.seqlen_k();
      const bool sees = inside && part[static_cast<std::size_t>(row * mask.seqlen_k() + j)] != 0;
      ASSERT_EQ(square.visible(0, 0, i, j), sees) << i << ", " << j;
    }
  }
}

TEST(Families, TwoCopiesOfAText) {
  const Documents documents = Documents::from_lengths(Numbers{3, 0, 5, 2});
  expect_part(make_family("block_diffusion", 21, {{"lengths", "3,0,5,2"}, {"blocks", "1,5,4"}}), 0,
              masks::block_diffusion(Documents::from_lengths(Numbers{1, 5, 4}), documents).mask);
  expect_part(make_family("block_diffusion", 20, {{"lengths", "3,0,5,2"}, {"blocks", "4"}}), 0,
              masks::block_diffusion(masks::equal_blocks(documents, 4), documents).mask);
  const Documents one = Documents::from_lengths(Numbers{16});
  expect_part(make_family("block_diffusion", 32, {{"concatenated", "1"}}), 0,
              masks::block_diffusion(masks::equal_blocks(one, 2), one, BlockDiffusionOrder::kConcatenated).mask);
  expect_part(make_family("block_diffusion", 32), 0, masks::block_diffusion(masks::equal_blocks(one, 2), one).mask);
}

TEST(Families, RowsOfDraftsBelowTheirContext) {
  const Documents documents = Documents::from_lengths(Numbers{3, 0, 5, 2});
  expect_part(make_family("eagle3_ttt", 32, {{"lengths", "3,0,5,2"}, {"steps", "3"}}), 20,
              masks::eagle3_ttt(documents, 3));
  expect_part(make_family("eagle3_ttt", 35), 24, masks::eagle3_ttt(Documents::from_lengths(Numbers{8}), 4));
  expect_part(make_family("dflash", 19, {{"lengths", "3,0,5,2"}, {"anchors", "2,3,9"}, {"block", "3"}}), 10,
              masks::dflash(documents, Numbers{2, 3, 9}, 3));
  expect_part(make_family("dflash", 4, {{"block", "9"}}), 4, masks::dflash(Documents::from_lengths(Numbers{4}), {}, 9));
}

TEST(Families, SharedQuestionParameters) {
  // Two groups of 20, the first with two answers, the second with none: it is a causal document.
  const Mask mask = make_family("shared_question", 40, {{"groups", "20,20"}, {"answers", "2,0"}}, 3);
  EXPECT_FALSE(mask.visible(0, 0, 20, 19));
  EXPECT_TRUE(mask.visible(0, 0, 39, 20));
  EXPECT_TRUE(mask.visible(0, 0, 19, 0)) << "an answer sees the question";
  int64_t first_answer = 0;  // the first key of the first group that its last row does not see
  while (mask.visible(0, 0, 19, first_answer)) ++first_answer;
  EXPECT_GT(first_answer, 0);
  EXPECT_LT(first_answer, 19);
  EXPECT_TRUE(mask.visible(0, 0, first_answer, first_answer));
}

TEST(FamilyErrors, UnknownNames) {
  expect_invalid({"unknown mask family 'casual'", "known: full, causal, ", "padding"},
                 [] { make_family("casual", 8); });
  expect_invalid({"unknown mask family ''"}, [] { make_family("", 8); });
  expect_invalid({"sliding_window has no parameter 'lft'", "known: left, right"},
                 [] { make_family("sliding_window", 8, {{"lft", "3"}}); });
  expect_invalid({"full has no parameter 'lengths'", "known: none"},
                 [] { make_family("full", 8, {{"lengths", "8"}}); });
}

TEST(FamilyErrors, NotANumber) {
  for (const std::string text :
       {"", "x", "1x", "1,", ",1", "1,,2", " 1", "1.5", "+1", "99999999999999999999", "1;2", "0x10"}) {
    expect_invalid({"document: parameter lengths is '" + text + "'", "integers separated by commas"},
                   [&] { make_family("document", 8, {{"lengths", text}}); });
  }
  expect_invalid({"sliding_window: parameter left takes one integer, not 2"},
                 [] { make_family("sliding_window", 8, {{"left", "1,2"}}); });
}

TEST(FamilyErrors, SequenceLength) {
  expect_invalid({"seqlen is -1", "between 0 and 2147483647"}, [] { make_family("causal", -1); });
  expect_invalid({"seqlen is 2147483648", "between 0 and 2147483647"}, [] { make_family("causal", kMaxSeqlen + 1); });
}

TEST(FamilyErrors, LengthsThatDoNotAddUp) {
  for (const std::string name : {"causal_document", "document", "causal_blockwise", "prefix_lm_document",
                                 "attention_sink_window", "block_causal", "causal_with_blocks"}) {
    expect_invalid({name + ": parameter lengths adds up to 7", "8"},
                   [&] { make_family(name, 8, {{"lengths", "3,4"}}); });
    expect_invalid({name + ": parameter lengths has the length -1"},
                   [&] { make_family(name, 8, {{"lengths", "9,-1"}}); });
  }
  for (const std::string name : {"block_diffusion", "eagle3_ttt", "dflash"}) {
    expect_invalid({name + ": parameter lengths adds up to 7", name == "eagle3_ttt" ? "2" : "4"},
                   [&] { make_family(name, 8, {{"lengths", "3,4"}}); });
  }
  expect_invalid({"shared_question: parameter groups adds up to 9", "8"},
                 [] { make_family("shared_question", 8, {{"groups", "9"}}); });
  expect_invalid({"prefix_tree: parameter lengths adds up to 2000000000", "8"},
                 [] { make_family("prefix_tree", 8, {{"parents", "-1"}, {"lengths", "2000000000"}}); });
  // A sum that wraps around 2^64 to the right total is no way in.
  const std::string wraps = "9223372036854775807,9223372036854775807,10",
                    beyond = "adds up to more than 2^63; it must be 8";
  expect_invalid({"document: parameter lengths", beyond}, [&] { make_family("document", 8, {{"lengths", wraps}}); });
  expect_invalid({"shared_question: parameter groups", beyond},
                 [&] { make_family("shared_question", 8, {{"groups", wraps}, {"answers", "4000000000000000000"}}); });
}

TEST(FamilyErrors, OtherParameters) {
  expect_invalid({"shared_question: parameter answers has -1"},
                 [] { make_family("shared_question", 8, {{"answers", "-1"}}); });
  expect_invalid({"shared_question: parameter answers has 3;", "length of group 1, 2"},
                 [] { make_family("shared_question", 8, {{"groups", "6,2"}, {"answers", "3"}}); });
  expect_invalid({"shared_question: parameter answers has 2 counts", "1 groups"},
                 [] { make_family("shared_question", 8, {{"groups", "8"}, {"answers", "1,2"}}); });
  expect_invalid({"prefix has 1 entries", "2 documents"},
                 [] { make_family("prefix_lm_document", 8, {{"lengths", "4,4"}, {"prefix", "1"}}); });
  expect_invalid({"prefix is 9", "seqlen, 8"}, [] { make_family("prefix_lm_causal", 8, {{"prefix", "9"}}); });
  expect_invalid({"qk_sparse: parameter spans has 3 integers", "begin,end pairs"},
                 [] { make_family("qk_sparse", 8, {{"spans", "1,2,3"}}); });
  expect_invalid({"dropped[0] is [1, 9)"}, [] { make_family("qk_sparse", 8, {{"spans", "1,9"}}); });
  expect_invalid({"hash_sparse: parameter buckets is 0", "at least 1"},
                 [] { make_family("hash_sparse", 8, {{"buckets", "0"}}); });
  expect_invalid({"hash_sparse: query_buckets has 2 and key_buckets 8 entries", "seqlen, 8"},
                 [] { make_family("hash_sparse", 8, {{"query_buckets", "1,2"}}); });
  expect_invalid({"hash_sparse: query_buckets has 8 and key_buckets 1 entries"},
                 [] { make_family("hash_sparse", 8, {{"key_buckets", "1"}}); });
  expect_invalid({"eviction: evicted_at has 1 entries", "seqlen, 8"},
                 [] { make_family("eviction", 8, {{"evicted_at", "1"}}); });
  expect_invalid({"lengths has 1 entries", "2 nodes"},
                 [] { make_family("prefix_tree", 8, {{"parents", "-1,0"}, {"lengths", "8"}}); });
  expect_invalid({"node 2 with parent 0", "depth-first"},
                 [] { make_family("prefix_tree", 8, {{"parents", "-1,-1,0"}}); });
  expect_invalid({"key_lengths[0] is 9", "seqlen_k, 8"}, [] { make_family("padding", 8, {{"key_lengths", "9"}}); });
  expect_invalid({"query_lengths has 1 entries and key_lengths 2"},
                 [] { make_family("padding", 8, {{"key_lengths", "1,2"}, {"query_lengths", "1"}}); });
  expect_invalid({"sink is -1"}, [] { make_family("attention_sink_window", 8, {{"sink", "-1"}}); });
  expect_invalid({"length is 0", "at least 1 token"}, [] { make_family("block_causal", 8, {{"blocks", "0"}}); });
  expect_invalid({"block_causal: parameter blocks adds up to 5", "8"},
                 [] { make_family("block_causal", 8, {{"blocks", "2,3"}}); });
  expect_invalid({"causal_with_blocks: parameter blocks has 1 integers", "begin,end pairs"},
                 [] { make_family("causal_with_blocks", 8, {{"blocks", "1"}}); });
  expect_invalid({"blocks[0] is [1, 9)"}, [] { make_family("causal_with_blocks", 8, {{"blocks", "1,9"}}); });
  expect_invalid({"length is 0", "at least 1 token"}, [] { make_family("block_diffusion", 8, {{"blocks", "0"}}); });
  expect_invalid({"block_diffusion: parameter blocks adds up to 5", "4"},
                 [] { make_family("block_diffusion", 8, {{"blocks", "2,3"}}); });
  expect_invalid({"block_diffusion: seqlen is 7", "concatenated", "even"},
                 [] { make_family("block_diffusion", 7, {{"concatenated", "1"}}); });
  expect_invalid({"eagle3_ttt: parameter steps is 0", "at least 1"},
                 [] { make_family("eagle3_ttt", 8, {{"steps", "0"}}); });
  expect_invalid({"dflash: parameter block is 0", "at least 1"}, [] { make_family("dflash", 8, {{"block", "0"}}); });
  expect_invalid({"dflash: parameter anchors has 3 entries", "2 blocks of 3"},
                 [] { make_family("dflash", 8, {{"anchors", "0,1,1"}, {"block", "3"}}); });
  expect_invalid({"anchors[1] is 1", "sort"}, [] { make_family("dflash", 8, {{"anchors", "2,1"}, {"block", "2"}}); });
  expect_invalid({"window left is -2"}, [] { make_family("sliding_window", 8, {{"left", "-2"}}); });
}

}  // namespace
}  // namespace flashmask::test
