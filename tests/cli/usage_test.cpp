// SPDX-License-Identifier: Apache-2.0
// Arguments that make no sense end with status 2 and say where help is.
#include <fmt/format.h>

#include <regex>
#include <sstream>

#include "cli/program.h"

namespace flashmask::test {
namespace {

constexpr const char* kHelp = "--help";

TEST(Usage, EveryCommandExplainsItself) {
  const std::string overview = output_of({kHelp});
  std::vector<std::string> commands;
  std::istringstream lines(overview.substr(overview.find("Subcommands:")));
  const std::regex entry("^  ([a-z]+) +[A-Z].*");
  std::smatch match;
  for (std::string line; std::getline(lines, line);) {
    if (std::regex_match(line, match, entry)) commands.push_back(match[1]);
  }
  EXPECT_EQ(commands, (std::vector<std::string>{"info", "show", "run", "decode", "verify", "bench"}));
  for (const std::string& command : commands) {
    SCOPED_TRACE(command);
    const std::string help = output_of({command, kHelp});
    expect_contains(overview, help.substr(0, help.find('\n')));
    for (const std::string& part : {"Usage: flashmask " + command, std::string(kHelp), std::string("--json")})
      expect_contains(help, part);
  }
}

TEST(Usage, ACommandIsNeeded) {
  expect_failure({}, kWrongUsage, {"command", "info", "show", "verify", "bench", kHelp});
}

TEST(Usage, AnUnknownCommandIsNamedNextToTheKnownOnes) {
  expect_failure({"attend"}, kWrongUsage, {"'attend'", "info", "show", "verify", "bench", kHelp});
  expect_failure({"attend", "--json"}, kWrongUsage, {"'attend'"});
}

TEST(Usage, UnknownOptionsAreNamed) {
  for (const char* command : {"info", "show", "verify", "bench"})
    expect_failure({command, "--bogus"}, kWrongUsage, {"--bogus", kHelp});
  expect_failure({"info", "--bogus", "--json"}, kWrongUsage, {"--bogus"});
  expect_failure({"bench", "--heads-kv", "2"}, kWrongUsage, {"unknown option '--heads-kv'", "--kv-heads", kHelp});
  expect_failure({"info", "extra"}, kWrongUsage, {"unexpected argument 'extra'"});
}

TEST(Usage, MissingValuesAreNamed) {
  expect_failure({"show", "causal", "--seqlen"}, kWrongUsage, {"--seqlen"});
  expect_failure({"bench", "--json"}, kWrongUsage, {"--json"});
  expect_failure({"show"}, kWrongUsage, {"FAMILY"});
}

TEST(Usage, BadNumbersAreNamed) {
  const std::vector<std::vector<std::string>> bad{{"show", "causal", "--seqlen", "x"},
                                                  {"show", "causal", "--seqlen", "-1"},
                                                  {"show", "causal", "--seqlen", "2147483648"},
                                                  {"show", "causal", "--seqlen", "1.5"},
                                                  {"show", "causal", "--head", "-1"},
                                                  {"show", "causal", "--batch", "x"},
                                                  {"show", "causal", "--seed", "-1"},
                                                  {"show", "causal", "--text-cells", "-1"},
                                                  {"verify", "--cases", "0"},
                                                  {"verify", "--cases", "-3"},
                                                  {"verify", "--cases", "many"},
                                                  {"verify", "--seed", "x"},
                                                  {"verify", "--threads", "-1"},
                                                  {"verify", "--jobs", "x"},
                                                  {"bench", "--seqlen", "0"},
                                                  {"bench", "--seqlen", "99999999999"},
                                                  {"bench", "--heads", "0"},
                                                  {"bench", "--kv-heads", "0"},
                                                  {"bench", "--head-dim", "257"},
                                                  {"bench", "--batch", "0"},
                                                  {"bench", "--rounds", "0"},
                                                  {"bench", "--threads", "-1"},
                                                  {"bench", "--seqlen", "18446744073709551616"}};
  for (const auto& arguments : bad) expect_failure(arguments, kWrongUsage, {arguments[arguments.size() - 2], kHelp});
}

struct Numbers {
  std::vector<std::string> command;
  std::vector<std::string> options;
};

/// Every option that takes a number.
const Numbers kNumbers[] = {
    {{"show", "causal"}, {"--seqlen", "--seed", "--batch", "--head", "--text-cells", "--ranks"}},
    {{"verify", "--list", "--covering"}, {"--head-dims"}},
    {{"verify", "--list"}, {"--cases", "--seed", "--threads", "--jobs"}},
    {{"run", "--task", "pretrain", "--input", "/dev/null"},
     {"--seqlen", "--heads", "--kv-heads", "--head-dim", "--threads", "--seed", "--limit-sequences", "--batch-size",
      "--dense-seconds"}},
    {{"decode"}, {"--prompt", "--drafts", "--page-size", "--heads", "--kv-heads", "--head-dim", "--threads", "--seed"}},
    {{"bench"}, {"--seqlen", "--batch", "--heads", "--kv-heads", "--head-dim", "--threads", "--rounds", "--seed"}}};

TEST(Usage, NoOptionTakesOneNumberForAnother) {
  for (const Numbers& numbers : kNumbers) {
    for (const std::string& option : numbers.options) {
      std::vector<std::string> bad{"-1", "1180591620717411303424", "nan", "inf", "1e400", "5x"};
      if (option != "--dense-seconds") bad.insert(bad.end(), {"010", "0x10", "1.0", "1e1", "+1"});
      for (const std::string& value : bad) {
        std::vector<std::string> arguments = numbers.command;
        arguments.push_back(fmt::format("{}={}", option, value));
        expect_failure(arguments, kWrongUsage, {option, "number from", kHelp});
      }
    }
  }
}

TEST(Usage, RefusalsNameTheValueAndWhatIsAccepted) {
  expect_failure({"show", "causal", "--ranks", "-1"}, kWrongUsage,
                 {"--ranks", "'-1' is not a whole number from 1 to 65536"});
  expect_failure({"run", "--task", "pretrain", "--input", "/dev/null", "--dense-seconds", "nan"}, kWrongUsage,
                 {"--dense-seconds", "'nan' is not a number from 0 to 1000000000"});
}

TEST(Usage, OptionsThatContradictEachOther) {
  expect_failure({"verify", "--covering", "--case", "family=full"}, kWrongUsage, {"--case", "--covering"});
}

TEST(Usage, OutputThatCannotBeWrittenIsAFailure) {
  const TemporaryFolder folder;
  const std::string input = folder.write("r.jsonl", "{\"text\": \"hello\"}\n");
  const std::vector<std::vector<std::string>> commands{
      {"--help"},
      {"--version"},
      {"info"},
      {"show", "causal"},
      {"show", "--list"},
      {"run", "--input", input, "--task", "pretrain", "--seqlen", "64"},
      {"decode", "--prompt", "20", "--backend", tested_backend()},
      {"verify", "--list"},
      {"verify", "--cases", "1", "--backend", tested_backend()},
      {"bench", "--families", "causal", "--seqlen", "16", "--rounds", "1", "--backend", tested_backend()}};
  for (std::vector<std::string> arguments : commands) {
    for (const bool json : {false, true}) {
      if (json && arguments[0].starts_with("--")) continue;
      if (json) arguments.push_back(arguments[0] == "bench" ? "--json=-" : "--json");
      const Outcome outcome = run_program(arguments, "/dev/full");
      EXPECT_EQ(outcome.status, kFailed) << arguments[0];
      EXPECT_TRUE(outcome.error.starts_with("flashmask: cannot write to stdout")) << outcome.error;
      EXPECT_EQ(std::count(outcome.error.begin(), outcome.error.end(), '\n'), 1) << outcome.error;
    }
  }
  EXPECT_EQ(run_program({"attend", "--json"}, "/dev/full").status, kWrongUsage);
}

}  // namespace
}  // namespace flashmask::test
