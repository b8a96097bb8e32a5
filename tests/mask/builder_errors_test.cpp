// SPDX-License-Identifier: Apache-2.0
// The builders' errors.
#include "flashmask/builders.h"

#include <gtest/gtest.h>

#include "flashmask/model_masks.h"
#include "mask/builder_checks.h"
#include "support/expect_error.h"
#include "support/extent.h"

namespace flashmask::test {
namespace {

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
