// SPDX-License-Identifier: Apache-2.0
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/json_output.h"
#include "flashmask/version.h"

namespace flashmask::cli {
namespace {

std::string version_text() {
  return fmt::format("flashmask {}.{}.{}", FLASHMASK_VERSION_MAJOR, FLASHMASK_VERSION_MINOR, FLASHMASK_VERSION_PATCH);
}

void add_commands(CLI::App& app, Global& global) {
  add_info_command(app, global);
  add_show_command(app, global);
  add_run_command(app, global);
  add_decode_command(app, global);
  add_verify_command(app, global);
  add_bench_command(app, global);
  for (CLI::App* command : app.get_subcommands({})) {
    // `bench` has a --json of its own.
    if (command->get_option_no_throw("--json")) continue;
    command->add_flag("--json", global.json, "One JSON object on stdout instead of text");
  }
}

/// True if a JSON object is expected on stdout; also asked when the arguments could not be parsed.
bool wants_json(const std::vector<std::string>& arguments) {
  if (std::find(arguments.begin(), arguments.end(), "--json=-") != arguments.end()) return true;
  const auto flag = std::find(arguments.begin(), arguments.end(), "--json");
  if (flag == arguments.end()) return false;
  // The --json of `bench` takes a file; "-" is stdout.
  const bool takes_file = std::find(arguments.begin(), arguments.end(), "bench") != arguments.end();
  return !takes_file || (flag + 1 != arguments.end() && *(flag + 1) == "-");
}

/// Error if no command comes first: nothing is there, or an unknown word. Empty if all is well.
std::string no_command(const CLI::App& app, const std::vector<std::string>& arguments) {
  if (!arguments.empty() && arguments[0].starts_with("-")) return "";
  std::string known;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (!arguments.empty() && command->get_name() == arguments[0]) return "";
    known += (known.empty() ? "" : ", ") + command->get_name();
  }
  const std::string what =
      arguments.empty() ? "a command is missing" : fmt::format("unknown command '{}'", arguments[0]);
  return fmt::format("{}; known: {}", what, known);
}

/// Names the words that no command took. CLI11's own message has them in reverse, without the valid alternatives.
std::string unexpected_words(const CLI::App& app) {
  const std::vector<std::string> words = app.remaining(/*recurse=*/true);
  const auto option =
      std::find_if(words.begin(), words.end(), [](const std::string& word) { return word.starts_with("-"); });
  if (option == words.end()) return fmt::format("unexpected argument '{}'", words.front());
  std::string known;
  for (const CLI::App* command : app.get_subcommands()) {
    for (const CLI::Option* entry :
         command->get_options([](const CLI::Option* o) { return !o->get_lnames().empty(); })) {
      known += (known.empty() ? "; known: --" : ", --") + entry->get_lnames().front();
    }
  }
  return fmt::format("unknown option '{}'{}", *option, known);
}

// Does not throw if nothing can be written, as fmt would.
void complain(const std::string& text) { std::fputs(("flashmask: " + text + "\n").c_str(), stderr); }

int fail(const std::string& text, bool json, int status) {
  if (std::ferror(stdout)) return status;  // which is the error, and close_stdout's to report
  complain(text);
  if (json) print_json({{"error", text}});
  return status;
}

int fail_usage(const std::string& text, bool json) {
  return fail(fmt::format("{}\nRun with --help for more information.", text), json, kUsageError);
}

int run(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + std::min(argc, 1), argv + argc);
  const bool json = wants_json(arguments);
  CLI::App app("Masked attention whose mask is data: see masks, run, check and time them.", "flashmask");
  app.footer(
      "Exit status: 0 for success, 1 for wrong input, a failed check or output that cannot be written, 2 for wrong "
      "arguments.");
  app.set_version_flag("--version", version_text(), "Print the version and exit");
  app.require_subcommand(1);
  Global global;
  add_commands(app, global);
  if (const std::string text = no_command(app, arguments); !text.empty()) return fail_usage(text, json);
  try {
    app.parse(argc, argv);
    return kSuccess;
  } catch (const Exit& exit) {
    return exit.status;
  } catch (const CLI::ExtrasError&) {
    return fail_usage(unexpected_words(app), json);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == static_cast<int>(CLI::ExitCodes::Success)) return app.exit(error);
    return fail_usage(error.what(), json);
  } catch (const std::bad_alloc&) {
    return fail("out of memory: the sizes asked for are too large for this machine", json, kFailure);
  } catch (const std::exception& error) {
    return fail(error.what(), json, kFailure);
  }
}

/// The status of the whole program, whose output may have been in a buffer until now: a full disk shows here.
int close_stdout(int status) {
  errno = 0;
  bool failed = std::ferror(stdout) != 0;
  failed = std::fflush(stdout) != 0 || failed;
  // A file system may keep its refusal until the end. A stdout that was closed from the start lost nothing.
  if (!failed) failed = std::fclose(stdout) != 0 && errno != EBADF;
  if (!failed) return status;
  complain(std::string("cannot write to stdout") + (errno != 0 ? std::string(": ") + std::strerror(errno) : ""));
  return status == kSuccess ? kFailure : status;
}

}  // namespace
}  // namespace flashmask::cli

int main(int argc, char** argv) { return flashmask::cli::close_stdout(flashmask::cli::run(argc, argv)); }
