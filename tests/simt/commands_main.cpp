// SPDX-License-Identifier: Apache-2.0

// `flashmask verify` and `flashmask run`, in a program whose CUDA devices are emulated.

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>

#include "cli/commands.h"

int main(int argc, char** argv) {
  CLI::App app("The commands 'flashmask verify' and 'flashmask run' on emulated CUDA devices.", "simt_commands");
  app.require_subcommand(1);
  flashmask::cli::Global global;
  flashmask::cli::add_verify_command(app, global);
  flashmask::cli::add_run_command(app, global);
  try {
    app.parse(argc, argv);
    return 0;
  } catch (const flashmask::cli::Exit& exit) {
    return exit.status;
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  } catch (const std::exception& error) {
    fmt::print(stderr, "simt_commands: {}\n", error.what());
    return 1;
  }
}
