// SPDX-License-Identifier: Apache-2.0
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
