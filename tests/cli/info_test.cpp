// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <iterator>
#include <nlohmann/json.hpp>
#include <thread>

#include "cli/program.h"
#include "flashmask/version.h"

namespace flashmask::test {
namespace {

std::string version() {
  return std::to_string(FLASHMASK_VERSION_MAJOR) + "." + std::to_string(FLASHMASK_VERSION_MINOR) + "." +
         std::to_string(FLASHMASK_VERSION_PATCH);
}

TEST(Info, SaysWhatIsCompiledInAndUsable) {
  const std::string text = output_of({"info"});
  expect_contains(text, version());
  for (const BackendInfo& backend : backends()) {
    expect_contains(text, backend.name);
    expect_contains(text, backend.detail);
  }
  const BackendInfo cuda = backends().front();
  ASSERT_EQ(cuda.name, "cuda");
  expect_contains(text, cuda.usable ? "GPUs: " + cuda.detail : "GPUs: none: " + cuda.detail);
}

TEST(Info, SaysTheSameAsJson) {
  const nlohmann::json json = json_of({"info", "--json"});
  EXPECT_EQ(json["version"], version());
  EXPECT_EQ(json["hardware_threads"], std::thread::hardware_concurrency());
  EXPECT_EQ(json["gpus"].size(), backends().front().usable ? 1u : 0u);
  const std::vector<BackendInfo> expected = backends();
  ASSERT_EQ(json["backends"].size(), expected.size());
  for (std::size_t n = 0; n < expected.size(); ++n) {
    EXPECT_EQ(json["backends"][n]["name"], expected[n].name);
    EXPECT_EQ(json["backends"][n]["usable"], expected[n].usable);
    EXPECT_EQ(json["backends"][n]["detail"], expected[n].detail);
  }
}

TEST(Info, NamesCudaAndWhyItIsNotUsableHere) {
  const BackendInfo cuda = backends().front();
  if (cuda.usable) GTEST_SKIP() << "it is usable: " << cuda.detail;
  // In a build without it, on a machine without a driver, or with one that is too old or sees no device that will do.
  const char* reasons[] = {"not compiled in", "CUDA driver", "CUDA device", "CUDA cannot be used",
                           "the kernels need 9.0"};
  EXPECT_TRUE(std::any_of(std::begin(reasons), std::end(reasons), [&](const char* r) {
    return contains(cuda.detail, r);
  })) << cuda.detail;
  const std::string text = output_of({"info"});
  const std::size_t line = text.find("\n  cuda ");
  ASSERT_NE(line, std::string::npos) << text;
  const std::string words = text.substr(line + 1, text.find('\n', line + 1) - line - 1);
  expect_contains(words, " not usable ");
  EXPECT_TRUE(words.ends_with(cuda.detail)) << words;
  EXPECT_EQ(json_of({"info", "--json"})["gpus_detail"], "none: " + cuda.detail);
}

TEST(Program, PrintsItsVersion) { EXPECT_EQ(output_of({"--version"}), "flashmask " + version() + "\n"); }

TEST(Program, HelpNamesEveryCommand) {
  const std::string text = output_of({"--help"});
  for (const char* command : {"info", "show", "verify", "bench"}) expect_contains(text, command);
}

TEST(Program, EveryCommandHasHelpAndTakesJson) {
  for (const char* command : {"info", "show", "verify", "bench"}) {
    SCOPED_TRACE(command);
    const std::string text = output_of({command, "--help"});
    expect_contains(text, std::string("Usage: flashmask ") + command);
    expect_contains(text, "--json");
  }
}

}  // namespace
}  // namespace flashmask::test
