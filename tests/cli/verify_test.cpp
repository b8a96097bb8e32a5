// SPDX-License-Identifier: Apache-2.0
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <thread>

#include "cli/program.h"
#include "verify/any_case.h"

namespace flashmask::test {
namespace {

using nlohmann::json;

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

std::vector<std::string> on_backend(std::vector<std::string> arguments) {
  arguments.insert(arguments.end(), {"--backend", tested_backend()});
  return arguments;
}

/// A call that no backend takes: the head dim is too large.
constexpr const char* kImpossible =
    "family=causal batch=1 seqlen_q=8 seqlen_k=8 heads_q=1 heads_kv=1 head_dim=300 head_dim_v=8";
constexpr const char* kPossible =
    "family=causal batch=1 seqlen_q=8 seqlen_k=8 heads_q=1 heads_kv=1 head_dim=8 head_dim_v=8";

TEST(Verify, EndsWithWhatPassed) {
  const std::vector<std::string> lines = lines_of(output_of(on_backend({"verify", "--cases", "12"})));
  ASSERT_FALSE(lines.empty());
  EXPECT_EQ(lines.back(), "12 passed, 0 failed");
}

TEST(Verify, NamesTheFeaturesThatNoCaseAsksFor) {
  EXPECT_EQ(json_of(on_backend({"verify", "--cases", "2", "--json"}))["refused_features"], json::array());
  EXPECT_EQ(output_of(on_backend({"verify", "--cases", "2"})).find("refuses"), std::string::npos);
}

/// All others are drawn, and refused ones are not.
TEST(Verify, AsksForTheFeaturesThatABackendTakes) {
  for (const bool covering : {false, true}) {
    const std::vector<std::string> which =
        covering ? std::vector<std::string>{"--covering"} : std::vector<std::string>{"--cases", "200"};
    const auto cases = [&](std::string backend) {
      std::vector<std::string> arguments{"verify", "--list", "--caches", "no", "--backend", backend};
      arguments.insert(arguments.end(), which.begin(), which.end());
      return output_of(arguments);
    };
    for (const char* word : {" sink=float32", " sink=own", " softcap=", " dropout=", " partial=", " split_size="}) {
      expect_contains(cases(tested_backend()), word);
      EXPECT_EQ(cases("cuda").find(word), std::string::npos);  // which has none yet
    }
  }
}

TEST(Verify, SaysTheSameAsJson) {
  const json result = json_of(on_backend({"verify", "--cases", "6", "--seed", "9", "--json"}));
  EXPECT_EQ(result["backend"], tested_backend());
  EXPECT_EQ(result["passed"], 6);
  EXPECT_EQ(result["failed"], 0);
  EXPECT_EQ(result["seed"], 9);
  EXPECT_EQ(result["failures"], json::array());
  for (const char* name : {"out", "lse", "dq", "dk", "dv"})
    EXPECT_LE(result["largest_errors"][name].get<double>(), 1) << name;
}

TEST(Verify, AFailureIsPrintedWithALineThatRunsItAgain) {
  const Outcome outcome = run_program(on_backend({"verify", "--case", kImpossible, "--case", kPossible}));
  EXPECT_EQ(outcome.status, kFailed);
  EXPECT_EQ(lines_of(outcome.out).back(), "1 passed, 1 failed");
  expect_contains(outcome.out, "FAILED case 0");
  expect_contains(outcome.out, "head_dim");
  expect_contains(outcome.out, "flashmask verify --backend " + tested_backend() + " --case '" +
                                   describe(verify::parse_case(kImpossible)) + "'");
}

TEST(Verify, AFailureAsJson) {
  const Outcome outcome = run_program(on_backend({"verify", "--case", kImpossible, "--json"}));
  EXPECT_EQ(outcome.status, kFailed);
  const json result = json::parse(outcome.out);
  EXPECT_EQ(result["failed"], 1);
  EXPECT_EQ(result["failures"][0]["case"], describe(verify::parse_case(kImpossible)));
  EXPECT_FALSE(result["failures"][0]["failures"].empty());
}

TEST(Verify, TheSameSeedGivesTheSameCases) {
  const auto cases = [](const char* seed) { return output_of({"verify", "--list", "--cases", "50", "--seed", seed}); };
  EXPECT_EQ(cases("1"), cases("1"));
  EXPECT_NE(cases("1"), cases("2"));
  const std::vector<std::string> lines = lines_of(cases("1"));
  EXPECT_EQ(lines.size(), 50u);
  EXPECT_EQ(std::set<std::string>(lines.begin(), lines.end()).size(), 50u);
  for (const std::string& line : lines) EXPECT_EQ(describe(verify::parse_any_case(line)), line);
  // A longer list begins with the shorter one.
  EXPECT_TRUE(output_of({"verify", "--list", "--cases", "60", "--seed", "1"}).starts_with(cases("1")));
}

TEST(Verify, ChecksCasesAsItDrawsThem) {
  const TemporaryFolder folder;
  const std::string error = folder / "error";
  const pid_t program = start_program(on_backend({"verify", "--cases", "1000000000000"}), "/dev/null", error);
  // A list that is made first would not end before memory does.
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(2);
  while (!contains(contents_of(error), "verify 1000000000000 cases: 0 %") &&
         std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  const std::string said = contents_of(error);
  kill(program, SIGKILL);
  wait_for(program);
  expect_contains(said, "verify 1000000000000 cases: 0 %");
}

TEST(Verify, AListIsPrintedAsItIsMade) {
  // The disk is full after some kilobytes; a list that is made first would not fit into any memory.
  for (const char* form : {"--json=false", "--json"}) {
    const Outcome outcome = run_program({"verify", "--list", "--cases", "1000000000000", form}, "/dev/full");
    EXPECT_EQ(outcome.status, kFailed);
    expect_contains(outcome.error, "cannot write to stdout");
  }
}

TEST(Verify, TheListAsJsonHasTheSameLines) {
  const std::vector<std::string> arguments{"verify", "--list", "--cases", "5"};
  const std::vector<std::string> lines = lines_of(output_of(arguments));
  EXPECT_EQ(json_of({"verify", "--list", "--cases", "5", "--json"}), nlohmann::json({{"cases", lines}}));
}

TEST(Verify, FamiliesLimitTheCases) {
  for (const std::string& line :
       lines_of(output_of({"verify", "--list", "--cases", "30", "--families", "document,prefix_tree"}))) {
    const std::string family = verify::parse_case(line).family;
    EXPECT_TRUE(family == "document" || family == "prefix_tree") << family;
  }
}

TEST(Verify, ListsTheCoveringCases) {
  const std::vector<std::string> lines = lines_of(output_of({"verify", "--covering", "--list"}));
  EXPECT_GE(lines.size(), 1500u);
  for (const std::string& line : lines) EXPECT_EQ(describe(verify::parse_any_case(line)), line);
  EXPECT_EQ(json_of({"verify", "--covering", "--list", "--json"})["cases"].size(), lines.size());
  for (const std::string& line : lines_of(output_of({"verify", "--covering", "--list", "--families", "padding"}))) {
    EXPECT_TRUE(line.starts_with("family=padding ")) << line;
  }
}

TEST(Verify, DrawsCallsOverCaches) {
  const auto count = [](std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), {"verify", "--list"});
    return std::ranges::count_if(lines_of(output_of(arguments)), verify::is_cached);
  };
  EXPECT_EQ(count({"--cases", "50"}), 10);
  EXPECT_EQ(count({"--cases", "50", "--families", "causal"}), 0);
  EXPECT_EQ(count({"--cases", "50", "--families", "causal", "--caches", "yes"}), 10);
  EXPECT_EQ(count({"--cases", "50", "--caches", "no"}), 0);
  EXPECT_EQ(count({"--cases", "50", "--caches", "only"}), 50);
  EXPECT_GE(count({"--covering"}), 36);
  EXPECT_EQ(count({"--covering", "--families", "causal"}), 0);
  EXPECT_EQ(count({"--covering", "--dtypes", "bfloat16"}), 0);
}

TEST(Verify, AListedCaseOverACacheRuns) {
  const std::string line = lines_of(output_of({"verify", "--list", "--cases", "5", "--caches", "only"})).at(4);
  EXPECT_EQ(lines_of(output_of(on_backend({"verify", "--case", line}))).back(), "1 passed, 0 failed");
}

TEST(Verify, AFailureOverACacheIsPrintedWithALineThatRunsItAgain) {
  const std::string line = "cache=table keys=9 rows=1 head_dim=300";
  const Outcome outcome = run_program(on_backend({"verify", "--case", line}));
  EXPECT_EQ(outcome.status, kFailed);
  expect_contains(outcome.out, "head_dim");
  expect_contains(outcome.out, "--case '" + describe(verify::parse_any_case(line)) + "'");
}

TEST(Verify, AListedCaseRuns) {
  const std::string line = lines_of(output_of({"verify", "--list", "--cases", "4", "--seed", "3"})).at(3);
  EXPECT_EQ(lines_of(output_of(on_backend({"verify", "--case", line}))).back(), "1 passed, 0 failed");
}

TEST(VerifyErrors, UnknownBackendsFamiliesAndCases) {
  expect_failure({"verify", "--backend", "abacus", "--cases", "3"}, kFailed, {"'abacus'", "reference"});
  expect_failure({"verify", "--backend", "abacus", "--json"}, kFailed, {"'abacus'", "reference"});
  expect_failure({"verify", "--families", "causal,diagonal"}, kFailed, {"'diagonal'", "prefix_tree"});
  expect_failure({"verify", "--families", ""}, kFailed, {"''"});
  expect_failure({"verify", "--case", "family=causal colour=3"}, kFailed, {"colour=3", "heads_q"});
  expect_failure({"verify", "--case", "cache=table colour=3"}, kFailed, {"colour=3", "page_size"});
  expect_failure({"verify", "--caches", "some"}, kWrongUsage, {"--caches", "some", "only"});
  expect_failure({"verify", "--case", "batch=x"}, kFailed, {"batch", "'x'"});
  expect_failure({"verify", "--case", "dtype=float8"}, kFailed, {"dtype", "float8", "bfloat16"});
  expect_failure({"verify", "--case", "heads_q=3 heads_kv=2"}, kFailed, {"heads_q", "heads_kv"});
}

TEST(Verify, TheCoveringListOfSomeValues) {
  const std::vector<std::string> lines = lines_of(output_of(
      {"verify", "--covering", "--list", "--dtypes", "bfloat16,float16", "--head-dims", "64", "--layouts", "aligned"}));
  EXPECT_GE(lines.size(), 1500u);
  for (const std::string& line : lines) {
    const verify::Case c = verify::parse_case(line);
    EXPECT_NE(c.dtype, DataType::kFloat32) << line;
    EXPECT_EQ(c.head_dim, 64) << line;
    EXPECT_EQ(c.head_dim_v, 64) << line;
    EXPECT_EQ(c.layout, verify::Layout::kAligned) << line;
  }
}

TEST(Verify, CasesThatTheDeviceDoesNotTakeAreSkippedWithTheReason) {
  const std::vector<std::string> arguments{"verify", "--backend", "cuda", "--case", kImpossible};
  if (const BackendInfo cuda = backends().front(); !cuda.usable) {
    expect_failure(arguments, kFailed, {"'cuda' is not usable here", cuda.detail});
    return;
  }
  const Outcome outcome = run_program(arguments);
  EXPECT_EQ(outcome.status, kFailed) << "nothing was checked";
  expect_contains(outcome.out, "skipped 1: cuda: ");
  EXPECT_EQ(lines_of(outcome.out).back(), "0 passed, 0 failed, 1 skipped");
}

TEST(VerifyErrors, ValuesOfTheCoveringListThatItDoesNotHave) {
  const auto covering = [](const char* option, const char* value) {
    return std::vector<std::string>{"verify", "--covering", "--list", option, value};
  };
  expect_failure(covering("--dtypes", "bfloat16,float8"), kFailed,
                 {"--dtypes", "'float8'", "float32, bfloat16, float16"});
  expect_failure(covering("--dtypes", "BF16"), kFailed, {"--dtypes", "'BF16'"});
  expect_failure(covering("--layouts", "bshd,sbhd"), kFailed, {"--layouts", "'sbhd'", "bshd, bhsd, padded, aligned"});
  expect_failure(covering("--head-dims", "64,65"), kFailed, {"head dim 65", "64, 72, 80"});
  expect_failure(covering("--head-dims", "0"), kWrongUsage, {"--head-dims", "'0'"});
  expect_failure(covering("--head-dims", "-64"), kWrongUsage, {"--head-dims", "'-64'"});
  expect_failure(covering("--head-dims", "wide"), kWrongUsage, {"--head-dims", "wide"});
  expect_failure(covering("--head-dims", "64.5"), kWrongUsage, {"--head-dims", "64.5"});
}

TEST(VerifyErrors, ValuesOfTheCoveringListWithoutIt) {
  for (const char* option : {"--dtypes", "--head-dims", "--layouts"}) {
    const std::string value = option == std::string("--head-dims") ? "64"
                              : option == std::string("--dtypes")  ? "bfloat16"
                                                                   : "bshd";
    expect_failure({"verify", option, value}, kWrongUsage, {option, "--covering"});
    expect_failure({"verify", "--covering", option}, kWrongUsage, {option});
  }
}

}  // namespace
}  // namespace flashmask::test
