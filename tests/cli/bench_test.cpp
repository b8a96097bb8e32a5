// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <nlohmann/json.hpp>

#include "cli/program.h"
#include "families/families.h"
#include "flashmask/inspect.h"

namespace flashmask::test {
namespace {

using nlohmann::json;

/// Small enough for a test.
std::vector<std::string> small(std::vector<std::string> more) {
  std::vector<std::string> arguments{"bench",      "--backend", tested_backend(), "--seqlen", "96", "--heads", "2",
                                     "--head-dim", "16",        "--rounds",       "1"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

std::vector<std::string> masks_of(const json& result) {
  std::vector<std::string> masks;
  for (const json& entry : result["cases"]) masks.push_back(entry["mask"]);
  return masks;
}

TEST(Bench, HasARowForEachOfThePapersMasks) {
  const std::string text = output_of(small({}));
  const std::vector<std::string> twelve{"full",
                                        "causal",
                                        "sliding_window",
                                        "causal_document",
                                        "document",
                                        "shared_question",
                                        "global_sliding_window",
                                        "causal_blockwise",
                                        "prefix_lm_document",
                                        "prefix_lm_causal",
                                        "qk_sparse",
                                        "random_eviction"};
  for (const std::string& mask : twelve) expect_contains(text, "\n" + mask + " ");
  EXPECT_EQ(masks_of(json_of(small({"--json", "-"}))), twelve);
}

TEST(Bench, AllFamilies) {
  EXPECT_EQ(masks_of(json_of(small({"--families", "all", "--no-backward", "--json", "-"}))).size(), families().size());
}

TEST(Bench, FiguresFollowFromTheTimes) {
  const json result = json_of(small({"--families", "causal_document,document", "--seed", "5", "--json", "-"}));
  EXPECT_EQ(result["backend"], tested_backend());
  ASSERT_EQ(result["cases"].size(), 2u);
  for (const json& entry : result["cases"]) {
    const MaskStatistics s = statistics(make_family(entry["mask"].get<std::string>(), 96, {}, 5));
    EXPECT_DOUBLE_EQ(entry["live_share"].get<double>(), s.live_share());
    EXPECT_DOUBLE_EQ(entry["visible_share"].get<double>(), s.visible_share());
    const AttentionFlops live = attention_flops(1, 2, 96, 96, 16, 16, s.live_share());
    const AttentionFlops seen = attention_flops(1, 2, 96, 96, 16, 16, s.visible_share());
    const double forward = entry["forward_ms"].get<double>(), backward = entry["backward_ms"].get<double>();
    EXPECT_GT(forward, 0);
    EXPECT_GT(backward, 0);
    EXPECT_GT(entry["plan_ms"].get<double>(), 0);
    EXPECT_NEAR(entry["forward_tflops"].get<double>(), live.forward / forward * 1e-9, 1e-12);
    EXPECT_NEAR(entry["backward_tflops"].get<double>(), live.backward / backward * 1e-9, 1e-12);
    EXPECT_NEAR(entry["forward_tflops_visible"].get<double>(), seen.forward / forward * 1e-9, 1e-12);
    EXPECT_NEAR(entry["backward_tflops_visible"].get<double>(), seen.backward / backward * 1e-9, 1e-12);
    EXPECT_FALSE(entry.contains("dense_forward_ms"));
  }
}

TEST(Bench, DenseAndNoBackward) {
  const json with_dense = json_of(small({"--families", "causal", "--dense", "--json", "-"}))["cases"][0];
  EXPECT_GT(with_dense["dense_forward_ms"].get<double>(), 0);
  EXPECT_GT(with_dense["dense_backward_ms"].get<double>(), 0);
  const json forward_only =
      json_of(small({"--families", "causal", "--no-backward", "--dense", "--json", "-"}))["cases"][0];
  EXPECT_TRUE(forward_only["backward_ms"].is_null());
  EXPECT_TRUE(forward_only["dense_backward_ms"].is_null());
  expect_contains(output_of(small({"--families", "causal", "--dense"})), "dense");
}

TEST(Bench, EveryDtypeAndGroupedHeads) {
  for (const char* dtype : {"float32", "bfloat16", "float16"}) {
    const json result = json_of(small({"--families", "causal", "--dtype", dtype, "--kv-heads", "1", "--batch", "2",
                                       "--threads", "1", "--json", "-"}));
    EXPECT_EQ(result["dtype"], dtype);
    EXPECT_EQ(result["heads_kv"], 1);
    EXPECT_EQ(result["batch"], 2);
  }
}

TEST(Bench, WritesJsonToAFileNextToTheTable) {
  const TemporaryFolder folder;
  const std::string path = folder / "bench.json";
  expect_contains(output_of(small({"--families", "document", "--json", path})), "document");
  EXPECT_EQ(masks_of(json::parse(contents_of(path))), std::vector<std::string>{"document"});
  EXPECT_EQ(folder.names(), std::vector<std::string>{"bench.json"});
}

TEST(BenchErrors, AnOutputThatCannotBeWrittenIsFoundBeforeTheWork) {
  const TemporaryFolder folder;
  expect_failure({"bench", "--seqlen", "100000", "--json=" + (folder / "no/such/bench.out")}, kFailed,
                 {"no/such/bench.out"});
}

TEST(BenchErrors, WrongArguments) {
  expect_failure({"bench", "--backend", "abacus"}, kFailed, {"'abacus'", "reference"});
  expect_failure({"bench", "--backend", "abacus", "--json", "-"}, kFailed, {"'abacus'", "reference"});
  expect_failure({"bench", "--families", "diagonal"}, kFailed, {"'diagonal'", "paper"});
  expect_failure({"bench", "--dtype", "int8"}, kFailed, {"dtype", "int8", "float16"});
  expect_failure({"bench", "--heads", "4", "--kv-heads", "3"}, kFailed, {"4", "3"});
  expect_failure({"bench", "--batch", "1000000", "--heads", "1000000", "--seqlen", "1000000"}, kFailed, {"elements"});
}

}  // namespace
}  // namespace flashmask::test
