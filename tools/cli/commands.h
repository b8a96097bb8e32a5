// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cli/command.h"

namespace CLI {
class App;
}

namespace flashmask::cli {

// Each adds one command to the program. Commands report errors by throwing flashmask::Error (or another
// std::exception); main prints the message.
void add_info_command(CLI::App& app, const Global& global);
void add_show_command(CLI::App& app, const Global& global);
void add_run_command(CLI::App& app, const Global& global);
void add_decode_command(CLI::App& app, const Global& global);
void add_verify_command(CLI::App& app, const Global& global);
void add_bench_command(CLI::App& app, const Global& global);

}  // namespace flashmask::cli
