// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cli/command.h"
#include "run/options.h"

namespace flashmask::run {

/// `flashmask run` with these options. Throws cli::Exit if the check of the results fails, flashmask::Error if the
/// input is wrong.
void run(const RunOptions& options, const cli::Global& global);

}  // namespace flashmask::run
