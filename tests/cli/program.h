// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "flashmask/attention.h"
#include "support/temporary_folder.h"

namespace flashmask::test {

/// How a run of the program ended, and what it wrote.
struct Outcome {
  int status = -1;
  std::string out, error;
  int64_t peak_bytes = 0;  ///< the most memory that it had
};

/// Starts the flashmask program with these arguments, stdout and stderr in files; no shell is involved.
inline pid_t start_program(const std::vector<std::string>& arguments, const std::string& out,
                           const std::string& error) {
  std::vector<char*> argv{const_cast<char*>(FLASHMASK_EXECUTABLE)};
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, out.c_str(), O_WRONLY | O_CREAT, 0600);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, error.c_str(), O_WRONLY | O_CREAT, 0600);
  pid_t child = 0;
  const int failed = posix_spawn(&child, FLASHMASK_EXECUTABLE, &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (failed != 0) throw std::runtime_error("cannot start " FLASHMASK_EXECUTABLE);
  return child;
}

/// Waits for the end of a program; its exit status, or -1 after a signal, and the memory it had.
inline Outcome wait_for(pid_t child) {
  int status = 0;
  rusage used{};
  if (wait4(child, &status, 0, &used) != child) throw std::runtime_error("lost the program");
  return {.status = WIFEXITED(status) ? WEXITSTATUS(status) : -1,
          .out = "",
          .error = "",
          .peak_bytes = int64_t{used.ru_maxrss} * 1024};
}

/// Runs the program. Its stdout is `device` if one is given.
inline Outcome run_program(const std::vector<std::string>& arguments, const std::string& device = "") {
  const TemporaryFolder folder;
  const std::string out = device.empty() ? folder / "out" : device, error = folder / "error";
  Outcome outcome = wait_for(start_program(arguments, out, error));
  if (device.empty()) outcome.out = contents_of(out);
  outcome.error = contents_of(error);
  return outcome;
}

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

inline void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_TRUE(contains(text, part)) << "'" << part << "' is not in:\n" << text;
}

/// The run succeeds; returns its stdout.
inline std::string output_of(const std::vector<std::string>& arguments) {
  const Outcome outcome = run_program(arguments);
  EXPECT_EQ(outcome.status, 0) << outcome.error;
  return outcome.out;
}

/// The run succeeds and its stdout is one JSON object; returns it.
inline nlohmann::json json_of(const std::vector<std::string>& arguments) {
  const nlohmann::json json = nlohmann::json::parse(output_of(arguments), nullptr, /*allow_exceptions=*/false);
  EXPECT_TRUE(json.is_object());
  return json;
}

/// The run ends with this status and a message that has all of `parts`, and says nothing on stdout; with
/// --json in the arguments, stdout has the message as an object.
inline void expect_failure(const std::vector<std::string>& arguments, int status,
                           const std::vector<std::string>& parts) {
  std::string line;
  for (const std::string& argument : arguments) line += " " + argument;
  SCOPED_TRACE("flashmask" + line);
  const Outcome outcome = run_program(arguments);
  EXPECT_EQ(outcome.status, status);
  EXPECT_TRUE(outcome.error.starts_with("flashmask: ")) << outcome.error;
  for (const std::string& part : parts) expect_contains(outcome.error, part);
  const auto flag = std::find(arguments.begin(), arguments.end(), "--json");
  const bool takes_file = !arguments.empty() && arguments[0] == "bench";
  const bool json_expected =
      flag != arguments.end() && (!takes_file || (flag + 1 != arguments.end() && *(flag + 1) == "-"));
  if (!json_expected) {
    EXPECT_EQ(outcome.out, "");
    return;
  }
  const nlohmann::json json = nlohmann::json::parse(outcome.out, nullptr, /*allow_exceptions=*/false);
  ASSERT_TRUE(json.is_object() && json.contains("error")) << outcome.out;
  for (const std::string& part : parts) expect_contains(json["error"], part);
}

inline constexpr int kFailed = 1, kWrongUsage = 2;

/// The backend that tests ask for: cpu, or the reference in a build without it.
inline std::string tested_backend() {
  for (const BackendInfo& backend : backends()) {
    if (backend.name == "cpu" && backend.usable) return backend.name;
  }
  return "reference";
}

}  // namespace flashmask::test
