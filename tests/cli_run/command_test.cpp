// SPDX-License-Identifier: Apache-2.0
// `flashmask run` as a user calls it.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "flashmask/attention.h"
#include "io/safetensors.h"
#include "support/temporary_folder.h"

namespace flashmask {
namespace {

using nlohmann::json;
using test::contents_of;
using test::TemporaryFolder;
using Names = std::vector<std::string>;

struct Result {
  int status = -1;
  std::string out, error;
};

std::string quoted(const std::string& argument) {
  std::string text = "'";
  for (const char c : argument) text += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return text + "'";
}

/// A build without the cpu backend has the reference alone, which is never chosen unless it is asked for.
bool only_reference() {
  for (const BackendInfo& backend : backends()) {
    if (backend.usable && backend.name != "reference") return false;
  }
  return true;
}

Result flashmask_run(const std::vector<std::string>& arguments) {
  const TemporaryFolder folder;
  std::string command = quoted(FLASHMASK_EXECUTABLE) + " run";
  const bool chosen = std::find(arguments.begin(), arguments.end(), "--backend") != arguments.end();
  if (!chosen && only_reference()) command += " --backend reference";
  for (const std::string& argument : arguments) command += fmt::format(" {}", quoted(argument));
  const int status =
      std::system(fmt::format("{} >{} 2>{}", command, quoted(folder / "out"), quoted(folder / "error")).c_str());
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, contents_of(folder / "out"), contents_of(folder / "error")};
}

std::vector<std::string> joined(std::vector<std::string> a, const std::vector<std::string>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

std::string example(const std::string& task) { return std::string(FLASHMASK_EXAMPLE_DATA) + "/" + task + ".jsonl"; }

/// Small enough for a test: every example record fits into 1600 tokens. The dense run is not cut short however
/// slow the machine is.
std::vector<std::string> small(const std::string& input, const std::string& task,
                               const std::string& dense_seconds = "1e9") {
  return {"--input", input, "--task",     task, "--seqlen",   "1600", "--limit-sequences", "2",
          "--heads", "2",   "--kv-heads", "1",  "--head-dim", "16",   "--dense-seconds",   dense_seconds};
}

void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in:\n" << text;
}

// --- each task from end to end ----------------------------------------------------------------------

void expect_good_figures(const json& figures, const std::string& task) {
  EXPECT_EQ(figures["passed"], true);
  EXPECT_EQ(figures["input"]["task"], task);
  EXPECT_EQ(figures["input"]["bad_lines"], json::array());
  EXPECT_GE(figures["input"]["records"].get<int64_t>(), task == "tree" ? 30 : 60);
  const json& packing = figures["packing"];
  const auto positions = packing["sequences"].get<double>() * packing["seqlen"].get<double>();
  EXPECT_NEAR(packing["padding_share"].get<double>(), 1 - packing["tokens"].get<double>() / positions, 1e-12);
  const json& masks = figures["masks"];
  EXPECT_EQ(masks["tiles"].get<int64_t>(), masks["skipped_tiles"].get<int64_t>() +
                                               masks["partial_tiles"].get<int64_t>() +
                                               masks["full_tiles"].get<int64_t>());
  EXPECT_GT(masks["skipped_tiles"].get<int64_t>(), masks["tiles"].get<int64_t>() / 2);
  EXPECT_EQ(masks["mask_bytes"].get<int64_t>(), 2 * 1600 * 4);
  EXPECT_EQ(masks["dense_mask_bytes"].get<int64_t>(), 2 * 1600 * 1600);
  for (const char* tensor : {"out", "lse", "dq", "dk", "dv"}) {
    const json& accuracy = figures["check"]["tensors"][tensor];
    EXPECT_LE(accuracy["max_error"].get<double>(), accuracy["limit"].get<double>()) << tensor;
    EXPECT_GT(accuracy["max_reference"].get<double>(), 0) << tensor;
    EXPECT_EQ(figures["comparison"]["bitwise_equal"][tensor], true) << tensor;
  }
  EXPECT_EQ(figures["comparison"]["sequences"], 2);
  EXPECT_GT(figures["times"]["forward_s"].get<double>(), 0);
  EXPECT_GT(figures["comparison"]["dense"]["backward_s"].get<double>(), 0);
}

TEST(Run, EveryTaskInEveryDtype) {
  for (const std::string task : {"pretrain", "sft", "dpo", "rm", "tree"}) {
    for (const std::string dtype : {"float32", "bfloat16", "float16"}) {
      SCOPED_TRACE(task + " " + dtype);
      const TemporaryFolder folder;
      const Result result = flashmask_run(
          joined(small(example(task), task), {"--dtype", dtype, "--json", "--out", folder / "x.safetensors"}));
      ASSERT_EQ(result.status, 0) << result.error;
      const json figures = json::parse(result.out);
      expect_good_figures(figures, task);
      EXPECT_EQ(figures["attention"]["dtype"], dtype);
      const io::SafetensorsFile file(folder / "x.safetensors");
      EXPECT_EQ(file.metadata().at("task"), task);
      EXPECT_EQ(file.metadata().at("source"), task + ".jsonl");
      // All sequences are written, not only the attended ones.
      EXPECT_EQ(file.at("input_ids").shape, (std::vector<int64_t>{figures["packing"]["sequences"], 1600}));
      EXPECT_GT(file.at("input_ids").shape[0], 2);
    }
  }
}

TEST(Run, EveryBackendAndBatchSize) {
  for (const BackendInfo& backend : backends()) {
    if (!backend.usable) continue;
    for (const std::string batch : {"1", "2"}) {
      const Result result = flashmask_run(
          joined(small(example("rm"), "rm"), {"--backend", backend.name, "--batch-size", batch, "--json"}));
      ASSERT_EQ(result.status, 0) << result.error;
      expect_good_figures(json::parse(result.out), "rm");
      EXPECT_EQ(json::parse(result.out)["attention"]["backend"], backend.name);
    }
  }
}

TEST(Run, PrintsFiguresForPeople) {
  const Result result = flashmask_run(joined(small(example("dpo"), "dpo"), {"--threads", "2"}));
  ASSERT_EQ(result.status, 0) << result.error;
  for (const char* part : {"62 records", "task dpo", "padding", "of the elements visible", "tiles of 128x128 skipped",
                           "2 heads, 1 key and value head, head dim 16, float32", "FLOP/s", "against an fp64 oracle",
                           "dense:", "the same bits in both runs"}) {
    expect_contains(result.out, part);
  }
}

template <typename Element>
std::vector<Element> elements(const io::SafetensorsEntry& entry) {
  const auto* data = reinterpret_cast<const Element*>(entry.data.data());
  return {data, data + entry.data.size() / sizeof(Element)};
}

/// Two questions: 3 tokens with answers of 3 and 4, 2 tokens with answers of 3 and 3.
constexpr const char* kQuestions =
    "{\"prompt\":\"ab\",\"chosen\":\"c\",\"rejected\":\"de\",\"answers\":[\"c\",\"de\"]}\n"
    "{\"prompt\":\"a\",\"chosen\":\"c\",\"rejected\":\"d\",\"answers\":[\"c\",\"d\"]}\n";
/// Two trees: of 2 + (3 + (3, 3), 3) tokens, and of 2 + 4.
constexpr const char* kTrees =
    "{\"text\":\"q\",\"branches\":[{\"text\":\"x\",\"branches\":[{\"text\":\"y\"},{\"text\":\"z\"}]},{\"text\":\"w\"}]}"
    "\n"
    "{\"text\":\"q\",\"branches\":[{\"text\":\"rs\"}]}\n";

std::vector<std::string> tiny(const std::string& input, const std::string& task) {
  return {"--input", input, "--task", task, "--seqlen", "32", "--heads", "1", "--kv-heads", "1", "--head-dim", "8"};
}

TEST(Run, SaysWhatSharingSaves) {
  const TemporaryFolder folder;
  for (const std::string task : {"dpo", "rm", "tree"}) {
    SCOPED_TRACE(task);
    const bool is_tree = task == "tree";
    const int64_t packed = is_tree ? 14 + 6 : 10 + 8, separate = is_tree ? (8 + 8 + 5) + 6 : (6 + 7) + (5 + 5);
    const std::string input = folder.write("x.jsonl", is_tree ? kTrees : kQuestions);
    const Result in_json = flashmask_run(joined(tiny(input, task), {"--json"}));
    ASSERT_EQ(in_json.status, 0) << in_json.error;
    const json sharing = json::parse(in_json.out)["packing"]["sharing"];
    EXPECT_EQ(sharing["tokens"], packed);
    EXPECT_EQ(sharing["separate_tokens"], separate);
    EXPECT_EQ(sharing["separate_sequences"], 4);
    EXPECT_DOUBLE_EQ(sharing["ratio"].get<double>(), static_cast<double>(separate) / static_cast<double>(packed));
    const Result in_text = flashmask_run(joined(tiny(input, task), {"--report", folder / "r.html"}));
    ASSERT_EQ(in_text.status, 0) << in_text.error;
    const std::string ratio = fmt::format("{:.2f}", static_cast<double>(separate) / static_cast<double>(packed));
    const std::string what = is_tree ? "each of 4 paths from root to leaf" : "each of 4 answers with its question";
    expect_contains(in_text.out, fmt::format("{} as a sequence of its own: {} tokens, {}x; sharing saves {}", what,
                                             separate, ratio, separate - packed));
    const std::string html = contents_of(folder / "r.html");
    expect_contains(html,
                    fmt::format("<td>{} as a sequence of its own</td><td>{}</td><td>{}×</td>", what, separate, ratio));
    expect_contains(html, fmt::format("<td>saved</td><td>{}</td>", separate - packed));
  }
}

TEST(Run, OnlyWhatSharesSaysSo) {
  for (const std::string task : {"pretrain", "sft"}) {
    const Result result = flashmask_run(joined(small(example(task), task, "0"), {"--json"}));
    ASSERT_EQ(result.status, 0) << result.error;
    EXPECT_FALSE(json::parse(result.out)["packing"].contains("sharing"));
    EXPECT_FALSE(json::parse(result.out)["packing"].contains("nodes"));
  }
}

TEST(Run, TreesInJsonAndInTheFile) {
  const TemporaryFolder folder;
  const std::string input = folder.write("x.jsonl", kTrees);
  const Result result = flashmask_run(joined(tiny(input, "tree"), {"--json", "--out", folder / "out"}));
  ASSERT_EQ(result.status, 0) << result.error;
  const json nodes = json::parse(result.out)["packing"]["nodes"];
  EXPECT_EQ(nodes["segment"], (json{0, 0, 0, 0, 0, 1, 1}));
  EXPECT_EQ(nodes["node"], (json{0, 1, 2, 3, 4, 0, 1}));
  EXPECT_EQ(nodes["parent"], (json{-1, 0, 1, 1, 0, -1, 0}));
  EXPECT_EQ(nodes["sequence"], (json{0, 0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(nodes["begin"], (json{0, 2, 5, 8, 11, 14, 16}));
  EXPECT_EQ(nodes["end"], (json{2, 5, 8, 11, 14, 16, 20}));
  const io::SafetensorsFile file(folder / "out");
  const std::vector<int32_t> table = elements<int32_t>(file.at("nodes"));
  const std::vector<std::string> columns{"segment", "node", "parent", "sequence", "begin", "end"};
  ASSERT_EQ(table.size(), 7 * columns.size());
  for (std::size_t at = 0; at < table.size(); ++at) EXPECT_EQ(nodes[columns[at % 6]][at / 6], table[at]) << at;
}

TEST(Run, TreesThatShareNothing) {
  const TemporaryFolder folder;
  const std::string input = folder.write("x.jsonl", "{\"text\":\"q\",\"branches\":[{\"text\":\"a\"}]}\n");
  const Result result = flashmask_run(joined(tiny(input, "tree"), {"--json"}));
  ASSERT_EQ(result.status, 0) << result.error;
  EXPECT_EQ(json::parse(result.out)["packing"]["sharing"]["ratio"], 1.0);
  expect_contains(flashmask_run(tiny(input, "tree")).out,
                  "the one path from root to leaf as a sequence of its own: 5 tokens, 1.00x; sharing saves 0");
}

TEST(Run, TheSameSeedGivesTheSameFile) {
  const TemporaryFolder folder;
  for (const char* name : {"a", "b"}) {
    ASSERT_EQ(flashmask_run(joined(small(example("sft"), "sft", "0"), {"--out", folder / name})).status, 0);
  }
  EXPECT_EQ(contents_of(folder / "a"), contents_of(folder / "b"));
  EXPECT_GT(contents_of(folder / "a").size(), 1000u);
}

TEST(Run, TheDenseRunCanBeLeftOut) {
  const Result result = flashmask_run(joined(small(example("sft"), "sft", "0"), {"--json"}));
  ASSERT_EQ(result.status, 0) << result.error;
  const json figures = json::parse(result.out);
  EXPECT_EQ(figures["passed"], true);
  EXPECT_EQ(figures["comparison"]["sequences"], 0);
  expect_contains(figures["comparison"]["note"], "--dense-seconds");
}

TEST(Run, ALongDenseRunIsMadeOnTheFirstSequences) {
  const Result result =
      flashmask_run({"--input", example("pretrain"), "--task", "pretrain", "--seqlen", "1600", "--limit-sequences", "6",
                     "--heads", "1", "--kv-heads", "1", "--head-dim", "8", "--dense-seconds", "1e-6", "--json"});
  ASSERT_EQ(result.status, 0) << result.error;
  const json figures = json::parse(result.out);
  EXPECT_EQ(figures["comparison"]["sequences"], 1);
  expect_contains(figures["comparison"]["note"], "on all 6 sequences");
}

TEST(Run, TheReportNeedsNothingElse) {
  const TemporaryFolder folder;
  for (const std::string task : {"pretrain", "sft", "rm", "tree"}) {
    const Result result = flashmask_run(joined(small(example(task), task), {"--report", folder / "r.html"}));
    ASSERT_EQ(result.status, 0) << result.error;
    std::string html = contents_of(folder / "r.html");
    expect_contains(html, "<!DOCTYPE html>");
    expect_contains(html, "all checks passed");
    expect_contains(html, "prefers-color-scheme: dark");
    expect_contains(html, "</html>");
    // The name space of SVG is the only address in it.
    for (std::size_t at; (at = html.find("http://www.w3.org/2000/svg")) != std::string::npos;) html.erase(at, 26);
    for (const char* part : {"http:", "https:", "<script", "<link", "<img", "@import", "url(//"})
      EXPECT_EQ(html.find(part), std::string::npos) << part;
    const auto count = [&](const std::string& part) {
      int64_t n = 0;
      for (std::size_t at = html.find(part); at != std::string::npos; at = html.find(part, at + 1)) ++n;
      return n;
    };
    for (const std::string tag :
         {"section", "table", "tr", "td", "th", "div", "svg", "figure", "span", "main", "title", "text"}) {
      EXPECT_EQ(count(fmt::format("<{}>", tag)) + count(fmt::format("<{} ", tag)), count(fmt::format("</{}>", tag)))
          << tag;
    }
  }
}

TEST(Run, TheReportEscapesWhatItQuotes) {
  const TemporaryFolder folder;
  const std::string input =
      folder.write("a<b>&c.jsonl", "{\"text\":\"a\"}\n{\"text\":\"b\",\"text\":\"b\"}\n{\"<i>\":1,\"<i>\":2}\n");
  const Result result = flashmask_run(
      {"--input", input, "--task", "pretrain", "--seqlen", "8", "--skip-bad", "--report", folder / "r.html"});
  ASSERT_EQ(result.status, 0) << result.error;
  const std::string html = contents_of(folder / "r.html");
  expect_contains(html, "a&lt;b&gt;&amp;c.jsonl");
  expect_contains(html, "the key &quot;&lt;i&gt;&quot; comes twice");
  EXPECT_EQ(html.find("<b>&c"), std::string::npos);
  EXPECT_EQ(html.find("<i>&"), std::string::npos);
}

TEST(Run, OneTokenOfTextIsEnough) {
  const TemporaryFolder folder;
  for (const std::string seqlen : {"3", "4", "129", "4096"}) {
    const Result result = flashmask_run({"--input", folder.write("x", "{\"text\":\"a\"}"), "--task", "pretrain",
                                         "--seqlen", seqlen, "--heads", "1", "--kv-heads", "1", "--head-dim", "1",
                                         "--out", folder / "out", "--report", folder / "report", "--json"});
    ASSERT_EQ(result.status, 0) << result.error << result.out;
    EXPECT_EQ(json::parse(result.out)["packing"]["tokens"], 3);
  }
}

// --- bad input --------------------------------------------------------------------------------------

/// One good record, and after it a line of every bad kind.
constexpr const char* kBadLines =
    "{\"prompt\":\"q\",\"response\":\"r\"}\n"
    "{\"prompt\":\"q\",\"response\":\n"
    "{prompt}\n"
    "\n"
    "[\"prompt\"]\n"
    "{\"prompt\":\"q\"}\n"
    "{\"prompt\":3,\"response\":\"r\"}\n"
    "{\"prompt\":\"q\",\"response\":\"\"}\n"
    "{\"prompt\":\"q\xff\",\"response\":\"r\"}\n"
    "{\"prompt\":\"q\",\"response\":\"0123456789012345678901234567890123456789\"}\n"
    "{\"prompt\":\"q\",\"response\":\"r\"";

constexpr const char* kReasons[] = {"line 2: truncated JSON",
                                    "line 3: malformed JSON at byte 2",
                                    "line 5: a JSON object is needed, not array",
                                    "line 6: the key \"response\" is missing",
                                    "line 7: \"prompt\" must be a string, not number",
                                    "line 8: \"response\" is empty",
                                    "line 9: invalid UTF-8 at byte 13",
                                    "line 10: the record has 44 tokens, more than a sequence of 20 holds",
                                    "line 11: truncated JSON",
                                    "--seqlen 44 takes them all"};

std::vector<std::string> bad_run(const std::string& input, const TemporaryFolder& folder) {
  return {"--input",    input, "--task",     "sft", "--seqlen", "20",           "--heads",  "1",
          "--kv-heads", "1",   "--head-dim", "8",   "--out",    folder / "out", "--report", folder / "report"};
}

TEST(Run, BadLinesEndTheRunAndNothingIsWritten) {
  const TemporaryFolder folder;
  const Result result = flashmask_run(bad_run(folder.write("x.jsonl", kBadLines), folder));
  EXPECT_EQ(result.status, 1);
  EXPECT_TRUE(result.out.empty()) << result.out;
  expect_contains(result.error, "has 9 bad lines");
  for (const char* reason : kReasons) expect_contains(result.error, reason);
  EXPECT_EQ(result.error.find("line 1:"), std::string::npos);
  EXPECT_EQ(result.error.find("line 4:"), std::string::npos);
  expect_contains(result.error, "Nothing was written");
  EXPECT_EQ(folder.names(), Names{"x.jsonl"});
}

TEST(Run, WrongNumbersOfAnswersAndBranches) {
  const TemporaryFolder folder;
  const auto error_of = [&](const std::string& task, const std::string& lines) {
    const Result result = flashmask_run(joined(tiny(folder.write("x.jsonl", lines), task), {"--out", folder / "out"}));
    EXPECT_EQ(result.status, 1);
    EXPECT_EQ(folder.names(), Names{"x.jsonl"});
    return result.error;
  };
  const std::string good = "{\"prompt\":\"q\",\"answers\":[\"a\",\"b\"]}\n";
  const std::string answers =
      error_of("rm", good + "{\"prompt\":\"q\",\"answers\":[\"a\"]}\n" + good +
                         "{\"prompt\":\"q\",\"answers\":[\"a\",\"b\",\"c\",\"d\",\"e\",\"f\",\"g\"]}\n");
  expect_contains(answers, "line 2: \"answers\" has 1 element; 2 to 6 are accepted");
  expect_contains(answers, "line 4: \"answers\" has 7 elements; 2 to 6 are accepted");
  const std::string branches =
      error_of("tree", std::string(kTrees) + "{\"text\":\"q\"}\n" +
                           "{\"text\":\"q\",\"branches\":[{\"text\":\"a\",\"branches\":[3]}]}\n" +
                           "{\"text\":\"q\",\"branches\":[{\"text\":\"0123456789012345678901234567890\"}]}\n");
  expect_contains(branches, "line 3: the key \"branches\" is missing");
  expect_contains(branches,
                  "line 4: \"branches\"[0].\"branches\"[0] must be an object with the key \"text\", not number");
  expect_contains(branches, "line 5: the record has 35 tokens, more than a sequence of 32 holds");
}

TEST(Run, BadLinesLeaveOldFilesAsTheyWere) {
  const TemporaryFolder folder;
  folder.write("out", "old");
  folder.write("report", "old");
  EXPECT_EQ(flashmask_run(bad_run(folder.write("x.jsonl", kBadLines), folder)).status, 1);
  EXPECT_EQ(contents_of(folder / "out"), "old");
  EXPECT_EQ(contents_of(folder / "report"), "old");
  EXPECT_EQ(folder.names(), (Names{"out", "report", "x.jsonl"}));
}

TEST(Run, BadLinesInJson) {
  const TemporaryFolder folder;
  const Result result = flashmask_run(joined(bad_run(folder.write("x.jsonl", kBadLines), folder), {"--json"}));
  EXPECT_EQ(result.status, 1);
  const json answer = json::parse(result.out);
  for (const char* reason : kReasons) expect_contains(answer["error"], reason);
}

TEST(Run, BadLinesCanBeSkipped) {
  const TemporaryFolder folder;
  const Result result =
      flashmask_run(joined(bad_run(folder.write("x.jsonl", kBadLines), folder), {"--skip-bad", "--json"}));
  ASSERT_EQ(result.status, 0) << result.error;
  for (const char* reason : kReasons) expect_contains(result.error, reason);
  const json figures = json::parse(result.out);
  EXPECT_EQ(figures["input"]["records"], 1);
  EXPECT_EQ(figures["input"]["lines"], 11);
  EXPECT_EQ(figures["input"]["blank_lines"], 1);
  ASSERT_EQ(figures["input"]["bad_lines"].size(), 9u);
  EXPECT_EQ(figures["input"]["bad_lines"][2]["line"], 5);
  EXPECT_EQ(folder.names(), (Names{"out", "report", "x.jsonl"}));
  expect_contains(contents_of(folder / "report"), "invalid UTF-8 at byte 13");
  EXPECT_EQ(io::SafetensorsFile(folder / "out").metadata().at("documents"), "1");
}

TEST(Run, SkippingEverythingIsAnError) {
  const TemporaryFolder folder;
  const Result result =
      flashmask_run(joined(bad_run(folder.write("x.jsonl", "{\"prompt\":\"q\"}\nnull\n"), folder), {"--skip-bad"}));
  EXPECT_EQ(result.status, 1);
  expect_contains(result.error, "No record is left");
  expect_contains(result.error, "line 2: a JSON object is needed, not null");
  EXPECT_EQ(folder.names(), Names{"x.jsonl"});
}

TEST(Run, InputsThatHoldNothing) {
  const TemporaryFolder folder;
  const auto error_of = [&](const std::string& input) {
    const Result result = flashmask_run(bad_run(input, folder));
    EXPECT_EQ(result.status, 1);
    return result.error;
  };
  expect_contains(error_of(folder / "missing.jsonl"), "cannot read");
  expect_contains(error_of(folder / "."), "it is a directory");
  expect_contains(error_of(folder.write("empty", "")), "holds no records");
  expect_contains(error_of(folder.write("empty", "\n \n")), "holds no records");
  EXPECT_EQ(folder.names(), Names{"empty"});
}

TEST(Run, OutputsThatCannotBeWrittenAreFoundOutAtOnce) {
  const TemporaryFolder folder;
  const auto start = std::chrono::steady_clock::now();
  for (const std::string option : {"--out", "--report"}) {
    // Without the check this would take minutes.
    const auto error_of = [&](const std::string& path) {
      const Result result = flashmask_run({"--input", example("pretrain"), "--task", "pretrain", "--heads", "64",
                                           "--kv-heads", "64", "--head-dim", "256", option, path});
      EXPECT_EQ(result.status, 1) << path;
      return result.error;
    };
    expect_contains(error_of(folder / "missing/x"), "cannot write");
    expect_contains(error_of(folder / "."), "it is a directory");
    expect_contains(error_of("/dev/null"), "it is not a regular file");
    expect_contains(error_of("/proc/x"), "cannot write");
    expect_contains(error_of(example("pretrain")), "are the same file");
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
  EXPECT_TRUE(folder.names().empty());
}

TEST(Run, OutputsMustDiffer) {
  const TemporaryFolder folder;
  const std::string input = folder.write("x.jsonl", kBadLines);
  const Result result =
      flashmask_run({"--input", input, "--task", "sft", "--out", folder / "y", "--report", folder / "./y"});
  EXPECT_EQ(result.status, 1);
  expect_contains(result.error, "--out and --report are the same file");
  EXPECT_EQ(flashmask_run({"--input", input, "--task", "sft", "--out", input}).status, 1);
  EXPECT_EQ(contents_of(input), kBadLines);
}

TEST(Run, WrongArguments) {
  const auto refuse = [](int status, const std::vector<std::string>& changed, const std::string& part) {
    const Result result = flashmask_run(joined({"--input", example("sft")}, changed));
    EXPECT_EQ(result.status, status) << part;
    EXPECT_TRUE(result.out.empty()) << result.out;
    expect_contains(result.error, part);
  };
  refuse(2, {"--task", "ppo"}, "ppo");
  refuse(2, {}, "--task");
  refuse(2, {"--task", "sft", "--seqlen", "2"}, "--seqlen");
  refuse(2, {"--task", "sft", "--seqlen", "2147483648"}, "--seqlen");
  refuse(2, {"--task", "sft", "--seqlen", "12x"}, "--seqlen");
  refuse(2, {"--task", "sft", "--heads", "0"}, "--heads");
  refuse(2, {"--task", "sft", "--kv-heads", "-1"}, "--kv-heads");
  refuse(2, {"--task", "sft", "--head-dim", "257"}, "--head-dim");
  refuse(2, {"--task", "sft", "--dtype", "float64"}, "--dtype");
  refuse(2, {"--task", "sft", "--threads", "-1"}, "--threads");
  refuse(2, {"--task", "sft", "--limit-sequences", "-1"}, "--limit-sequences");
  refuse(2, {"--task", "sft", "--dense-seconds", "-1"}, "--dense-seconds");
  refuse(2, {"--task", "sft", "--out", ""}, "--out");
  refuse(2, {"--task", "sft", "--unknown"}, "--unknown");
  refuse(1, {"--task", "sft", "--heads", "3", "--kv-heads", "2"}, "--heads is 3 and --kv-heads 2");
  refuse(1, {"--task", "sft", "--backend", "quantum"}, "--backend is 'quantum'");
  for (const BackendInfo& backend : backends()) {
    if (backend.name != "cuda") continue;
    if (backend.usable) {
      refuse(1, {"--task", "sft", "--backend", "cuda", "--dtype", "float32"}, "it must be bfloat16 or float16");
    } else {
      refuse(1, {"--task", "sft", "--backend", "cuda"}, "--backend is cuda, not usable here: " + backend.detail);
    }
  }
  refuse(1, {"--task", "sft", "--seqlen", "2000000000"}, "GiB");
  refuse(1, {"--task", "sft", "--seqlen", "3"}, "more than a sequence of 3 holds");
  refuse(1, {"--task", "rm"}, "the key \"answers\" is missing");
  refuse(1, {"--task", "tree"}, "the key \"text\" is missing");
}

}  // namespace
}  // namespace flashmask
