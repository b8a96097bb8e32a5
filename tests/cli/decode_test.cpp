// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "cli/program.h"

namespace flashmask::test {
namespace {

using nlohmann::json;

std::vector<std::string> decode_arguments(std::vector<std::string> more) {
  std::vector<std::string> arguments{"decode", "--prompt",   "200", "--drafts",   "40", "--heads",
                                     "4",      "--kv-heads", "2",   "--head-dim", "16", "--backend"};
  arguments.insert(arguments.end(), {tested_backend(), "--threads", "1"});
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

TEST(Decode, ChecksEveryDtypeInPagesOfAnySize) {
  for (const char* dtype : {"float32", "bfloat16", "float16"}) {
    for (const char* page_size : {"1", "7", "16", "256"}) {
      const json result = json_of(decode_arguments({"--dtype", dtype, "--page-size", page_size, "--json"}));
      EXPECT_EQ(result["passed"], true) << dtype << page_size;
      EXPECT_EQ(result["checks"].size(), 4u);
      for (const json& check : result["checks"]) {
        EXPECT_EQ(check["passed"], true) << check;
        EXPECT_GT(check["max_error"].get<double>(), 0) << check;
      }
    }
  }
}

TEST(Decode, DrawsATreeAndPagesInNoOrder) {
  const json result = json_of(decode_arguments({"--page-size", "8", "--json"}));
  const auto parents = result["parents"].get<std::vector<int>>(), table = result["page_table"].get<std::vector<int>>();
  ASSERT_EQ(parents.size(), 40u);
  EXPECT_EQ(parents[0], -1);
  for (int t = 1; t < 40; ++t)
    EXPECT_TRUE(parents[static_cast<std::size_t>(t)] >= 0 && parents[static_cast<std::size_t>(t)] < t);
  EXPECT_LT(std::set<int>(parents.begin(), parents.end()).size(), 38u) << "no branches";
  EXPECT_EQ(table.size(), 30u);
  EXPECT_EQ(std::set<int>(table.begin(), table.end()).size(), 30u);
  EXPECT_FALSE(std::ranges::is_sorted(table));
  EXPECT_LT(table.size(), result["pages"].get<std::size_t>());
  // Two words of bits and a depth for each draft; all keys are read, 16-bit ones, for two heads.
  EXPECT_EQ(result["bytes"]["mask"], 40 * (2 + 1) * 4);
  EXPECT_EQ(result["bytes"]["read"], 240 * 2 * 2 * 16 * 2);
}

TEST(Decode, WritesAReportThatNeedsNothingElse) {
  const TemporaryFolder folder;
  const std::string path = folder / "decode.html";
  const std::string text = output_of(decode_arguments({"--report", path}));
  expect_contains(text, "written    " + path);
  expect_contains(text, "a tree of 40");
  const std::string page = contents_of(path);
  for (const char* part : {"<!DOCTYPE html>", "all checks passed", "Pages of the cache", "The mask of the drafts"})
    expect_contains(page, part);
  for (const char* other : {"http://", "https://", "<script", "<link"})
    EXPECT_EQ(page.find(other), std::string::npos) << other;
}

TEST(Decode, TheSameSeedDrawsTheSame) {
  const auto drawn = [](const char* seed) {
    const json result = json_of(decode_arguments({"--json", "--seed", seed}));
    return json{result["parents"], result["page_table"], result["checks"]};
  };
  EXPECT_EQ(drawn("3"), drawn("3"));
  EXPECT_NE(drawn("3"), drawn("4"));
}

TEST(Decode, NamesWhatIsWrong) {
  expect_failure({"decode", "--heads", "3"}, kFailed, {"--heads is 3", "--kv-heads 2"});
  expect_failure({"decode", "--drafts", "129"}, kWrongUsage, {"--drafts", "128"});
  expect_failure(decode_arguments({"--dtype", "float8"}), kWrongUsage, {"--dtype", "float8"});
  expect_failure(decode_arguments({"--report", "/nowhere/decode.html"}), kFailed, {"/nowhere"});
  expect_failure({"decode", "--backend", "abacus"}, kFailed, {"abacus"});
}

}  // namespace
}  // namespace flashmask::test
